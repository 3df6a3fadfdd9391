"""Where a setting comes from and what children are given of it; no control character in a log; the table of metrics."""

import ast
import ipaddress
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel, SecretStr

from activities.hosts.workers import worker_environment
from benchmarks.pages import pages
from longshore.metrics import METRICS, metric_of
from shared.addresses import is_plainly_private, is_public
from shared.child_environment import SECRET_SETTINGS, Kind, child_environment
from shared.settings import S3Settings, Settings, user_config_path
from shared.storage.store import LocalStore, open_store


def test_the_nearer_source_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    assert Settings().api_url == "http://127.0.0.1:8484"
    user_config_path().parent.mkdir(parents=True)
    user_config_path().write_text('api_url = "http://user"\nwandb_project = "mine"\n')
    assert Settings().api_url == "http://user"
    Path("longshore.toml").write_text('api_url = "http://project"\n')
    assert Settings().api_url == "http://project"
    assert Settings().wandb_project == "mine"
    monkeypatch.setenv("LONGSHORE_API_URL", "http://environment")
    assert Settings().api_url == "http://environment"
    assert Settings(api_url="http://argument").api_url == "http://argument"


def test_nested_settings_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSHORE_DOWNLOAD__MAX_BYTES", "10")
    monkeypatch.setenv("LONGSHORE_S3__ENDPOINT_URL", "http://127.0.0.1:9")
    assert Settings().download.max_bytes == 10
    assert Settings().s3.endpoint_url == "http://127.0.0.1:9"


def test_the_store_is_below_the_root_unless_told(tmp_path: Path) -> None:
    assert Settings(root=tmp_path).store == f"file://{tmp_path}/store"
    odd = tmp_path / "a b%20c#d?e"
    assert open_store(Settings(root=odd).store, S3Settings()).uri == LocalStore(odd / "store").uri
    assert Settings(root=tmp_path, store_uri="s3://bucket/x").store == "s3://bucket/x"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:169.254.169.254", "64:ff9b::7f00:1", "2002:7f00:1::", "fd00:ec2::254",
        # and no global unicast
        "fec0::1", "feff::1", "4000::1", "100::1", "::8.8.8.8", "64:ff9b:1::808:808",
    ],
)  # fmt: skip
def test_private_addresses(address) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("inner", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.1.1", "0.0.0.0"])
@pytest.mark.parametrize(
    "form",
    [
        "::{}", "::ffff:{}", "::ffff:0:{}", "64:ff9b::{}", "64:ff9b:1::{}", "64:ff9b:1:7f00:0:1::", "fec0::{}",
        "2606:2800:220:1:0:5efe:{}", "2606:2800:220:1:200:5efe:{}", "2002:{hex}::1", "2002:{hex}:1:2:3:4:5",
        "2001:0:{hex}::1", "2001:0:808:808:0:0:{flipped}",
    ],
)  # fmt: skip
def test_no_form_of_ipv6_carries_a_private_ipv4_address(form: str, inner: str) -> None:
    number = int(ipaddress.IPv4Address(inner))
    flipped = number ^ 0xFFFFFFFF
    address = form.format(
        inner, hex=f"{number >> 16:x}:{number & 0xFFFF:x}", flipped=f"{flipped >> 16:x}:{flipped & 0xFFFF:x}"
    )
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "8.8.8.8", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses(address) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("host", "is_private"),
    [
        ("127.0.0.1", True), ("127.1", True), ("0x7f.1", True), ("2130706433", True), ("::1", True),
        ("::ffff:10.0.0.1", True), ("localhost", True), ("LocalHost.", True), ("a.localhost", True),
        ("8.8.8.8", False), ("2606:2800:220:1::1", False), ("example.org", False), ("localhost.example.org", False),
        ("127.0.0.1.example.org", False), ("", False), ("." * 70, False), ("é", False), ("a" * 300, False),
    ],
)  # fmt: skip
def test_what_is_private_as_it_is_written(host: str, is_private: bool) -> None:
    assert is_plainly_private(host) == is_private


def secret_fields(model: type[BaseModel], place: str = "") -> set[str]:
    """Of what is a secret by its type or its name."""
    found = set()
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= secret_fields(kind, f"{place}{name}__")
        elif "SecretStr" in str(kind) or kind is SecretStr or re.search(r"key|secret|token|password", name):
            found.add(place + name)
    return found


def test_of_every_secret_among_the_settings_it_is_said_who_is_told():
    assert {"api_key", "database_url", "sampling__api_key"} <= secret_fields(Settings)
    missing = {name for name in secret_fields(Settings) if not {name, name.split("__")[0]} & SECRET_SETTINGS.keys()}
    assert missing == set()


def test_a_process_is_told_what_is_listed_for_its_kind_and_no_more():
    given = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "AWS_PROFILE": "x",
        "HTTPS_PROXY": "http://user:password@proxy",
        "HF_TOKEN": "x",
        "WANDB_API_KEY": "x",
        "NCCL_DEBUG": "INFO",
        "GITHUB_TOKEN": "x",
        "LONGSHORE_ROOT": "/root",
        "LONGSHORE_SHAPE": "cpu",
        "longshore_database_url": "x",
        "LONGSHORE_SAMPLING__URL": "x",
        "LONGSHORE_SAMPLING__API_KEY": "x",
        "LONGSHORE_SAMPLING__VLLM_COMMAND": "x",
        "LONGSHORE_UNKNOWN": "x",
        "VLLM_LOGGING_LEVEL": "x",
    }
    always, s3 = {"PATH", "LC_ALL", "LONGSHORE_ROOT", "PYTHONPATH"}, {"AWS_PROFILE", "HTTPS_PROXY"}
    forked = {"LANG", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "ARROW_DEFAULT_MEMORY_POOL", "MALLOC_ARENA_MAX"}
    told = {
        "temporal": always,
        "web": always | s3 | {"LONGSHORE_SHAPE", "longshore_database_url", "LONGSHORE_SAMPLING__URL"},
        "gpu": always | s3 | {"LONGSHORE_SHAPE", "NCCL_DEBUG"},
        "sampler": always
        | s3
        | {"LONGSHORE_SHAPE", "NCCL_DEBUG", "VLLM_LOGGING_LEVEL", "LONGSHORE_SAMPLING__VLLM_COMMAND"},
        "worker": always | {"NCCL_DEBUG", "VLLM_LOGGING_LEVEL"},
        "vllm": {"PATH", "LC_ALL", "NCCL_DEBUG", "VLLM_LOGGING_LEVEL"}
        | {"HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"},
        "wandb": always | {"HTTPS_PROXY", "WANDB_API_KEY", "WANDB_ERROR_REPORTING", "WANDB_SILENT"},
        "confined": {"PATH"} | forked,
        "decoder": {"PATH"} | forked,
        "template": {"PATH", "LANG", "PYTHONHASHSEED"},
    }
    assert {kind: set(child_environment(kind, given)) for kind in told} == told
    store = ("web", "control", "gpu", "sampler")
    assert [kind for kind in get_args(Kind) if "AWS_PROFILE" in child_environment(kind, given)] == list(store)
    settings = Settings(s3=S3Settings(endpoint_url="http://s3", region="x"))
    assert not [name for name in worker_environment(settings) if "S3" in name]


def test_a_secrets_file_is_named_to_whom_the_secret_is_told():
    given = {f"LONGSHORE_{name}_FILE": "/run/x" for name in ("SEAL_KEY", "DATABASE_URL", "SAMPLING__API_KEY", "OTHER")}
    told = {kind: child_environment(kind, given).keys() & given.keys() for kind in get_args(Kind)}
    assert told["web"] == {"LONGSHORE_SEAL_KEY_FILE", "LONGSHORE_DATABASE_URL_FILE"}
    assert told["control"] == {"LONGSHORE_SEAL_KEY_FILE", "LONGSHORE_SAMPLING__API_KEY_FILE"}
    assert told["gpu"] == told["sampler"] == {"LONGSHORE_SEAL_KEY_FILE"}
    assert not any(names for kind, names in told.items() if kind not in ("web", "control", "gpu", "sampler"))


ROOT = Path(__file__).parents[2]
HOSTILE = "a\n2026-01-01 00:00:00 INFO forged\r\x1b[2J\x9b\u2028\u202eb"
LOGS = f"""
import logging, sys
from shared.log_lines import escape_output, start_logging
escape_output()
start_logging()
text = {HOSTILE!r}
logging.getLogger("x").warning("from %s", text)
try:
    raise ValueError(text)
except ValueError:
    logging.getLogger("x").exception("failed")
print(text)
raise ValueError(text)
"""
# What these write is an answer for their parent, or for who runs them.
ANSWERS_ALONE = {
    "activities/grading/open_grader.py",
    "activities/hosts/health.py",
    "activities/sandbox/box.py",
    "activities/sandbox/child.py",
    "megatron_worker/sampler/grammars/trial.py",
    "megatron_worker/training/trial.py",
    "megatron_worker/weight_sync/__main__.py",
}


def test_control_characters_are_escaped_in_messages_tracebacks_and_prints() -> None:
    done = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, timeout=60)
    first, *rest = done.stderr.split("\n")
    assert first.endswith(r"x: from a\n2026-01-01 00:00:00 INFO forged\r\x1b[2J\x9b\u2028\u202eb")
    logged = rest[: next(n for n, line in enumerate(rest) if line.startswith("Traceback"))]
    assert [line for line in logged if "INFO forged" in line and not line.startswith("  ")] == []
    assert not set(done.stdout + done.stderr) & set("\r\x1b\x9b\u2028\u202e")
    assert r"\x1b[2J" in done.stdout


def test_every_process_of_ours_begins_so() -> None:
    """Each module that is run as a process, and writes a log, calls it under `if __name__`."""
    entries = [
        path
        for package in ("service", "activities", "megatron_worker")
        for path in (ROOT / package).rglob("*.py")
        if any(
            isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
            for node in ast.parse(path.read_text()).body
        )
    ]
    missing = [
        str(path.relative_to(ROOT))
        for path in entries
        if "escape_output()" not in path.read_text() and str(path.relative_to(ROOT)) not in ANSWERS_ALONE
    ]
    assert len(entries) > 5
    assert missing == []


def test_as_json_a_message_is_one_line_with_its_ids() -> None:
    logs = LOGS.replace("start_logging()", 'start_logging("json", lambda: {"run_id": "sft-1"})', 1)
    logs = logs.replace('import start_logging("json", lambda: {"run_id": "sft-1"})', "import start_logging")
    done = subprocess.run([sys.executable, "-c", logs], capture_output=True, text=True, timeout=60)
    lines = done.stderr.split("\nTraceback")[0].splitlines()
    first, second = map(json.loads, lines)
    assert first["message"] == f"from {HOSTILE}" and first["run_id"] == "sft-1"
    assert "ValueError" in second["exception"] and second["level"] == "ERROR"
    assert not set(done.stderr) & set("\r\x1b\x9b\u2028\u202e")


def test_pages_have_the_tables_of_the_code() -> None:
    for name, page in pages().items():
        assert (ROOT / "docs" / name).read_text() == page, "python -m benchmarks.pages"
    elsewhere = (ROOT / "docs" / "metrics.md").read_text().partition("## Elsewhere")[2]
    assert (named := re.findall(r"(?m)^\| `(.*?)` \|", elsewhere)) and not set(named) - METRICS.keys()


def test_a_name_is_its_own_metric_or_one_of_several() -> None:
    for name, metric in (("loss", "loss"), ("eval_loss", "eval_loss"), ("eval_sums_loss", "eval_*")):
        assert metric_of(name) is METRICS[metric]
    assert metric_of("dropped_for_routes") is METRICS["dropped_for_*"] and metric_of("trajectory_length") is not None
    assert metric_of("lost") is None and metric_of("losses") is None
