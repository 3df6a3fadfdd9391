"""The hub, played by a server of our own: what is asked of it before weights are, and how much may come."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from activities.sources.models import HubId, snapshot
from tests.served import ANY_PORT, Quiet, served

REPOSITORY = Path(__file__).parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "model.safetensors"

RESOLVE = """
import sys
from pathlib import Path
from activities.host_context import HostContext
from activities.models.resolve import Resolve
from shared.runs.start import ModelRequest
from shared.settings import DownloadSettings, Settings
from temporalio.testing import ActivityEnvironment
settings = Settings(root=Path(sys.argv[1]), download=DownloadSettings(max_bytes=int(sys.argv[2])))
try:
    resolve = Resolve(HostContext(settings)).resolve_model
    ActivityEnvironment().run(resolve, ModelRequest(uri="org/name", tenant="acme"))
    print("resolved")
except Exception as error:
    print(type(error).__name__, error)
"""


@dataclass
class Hub:
    """`files`: what the repository holds. `said`: sizes that are not told as they are. `sent`: bytes, by file."""

    files: dict[str, bytes]
    said: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    url: str = ""

    def size(self, name: str) -> int:
        return self.said.get(name, len(self.files[name]))


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Asked(Quiet):
        def do_HEAD(self) -> None:
            self._file(with_content=False)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/org/name/tree/"):
                self._json(
                    [{"type": "file", "path": n, "size": hub.size(n), "oid": _oid(n)} for n in sorted(hub.files)]
                )
            elif path.startswith("/api/models/org/name"):
                self._json({"id": "org/name", "sha": COMMIT, "siblings": []})
            else:
                self._file(with_content=True)

        def _json(self, value: object) -> None:
            self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _file(self, with_content: bool) -> None:
            name = self.path.rpartition("/")[2]
            if name not in hub.files:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("ETag", f'"{_oid(name)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if not with_content:
                self.send_header("Content-Length", str(hub.size(name)))
            self.end_headers()
            if with_content:
                with suppress(OSError):
                    for start in range(0, len(hub.files[name]), 1 << 16):
                        self.wfile.write(hub.files[name][start : start + (1 << 16)])
                        hub.sent[name] = start + (1 << 16)

    with served(ThreadingHTTPServer(ANY_PORT, Asked)) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        yield hub


def _oid(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


@pytest.fixture
def files(tiny_model: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in tiny_model.iterdir() if path.is_file()}


def resolved(hub: Hub, tmp_path: Path, max_bytes: int = 1 << 30) -> str:
    """In a process of its own: the library reads its environment once."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}
    answer = subprocess.run(
        [sys.executable, "-c", RESOLVE, str(tmp_path / "root"), str(max_bytes)],
        capture_output=True, text=True, cwd=REPOSITORY, env=environment, timeout=120,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def test_a_model_is_fetched(files: dict[str, bytes], tmp_path: Path) -> None:
    with serving(Hub(files)) as hub:
        assert resolved(hub, tmp_path) == "resolved"
        assert WEIGHTS in hub.sent


def test_weights_are_not_asked_for_when_the_config_cannot_be_used(files: dict[str, bytes], tmp_path: Path) -> None:
    files["config.json"] = files["config.json"].replace(b"qwen3", b"mamba")
    with serving(Hub(files)) as hub:
        assert "is not a known family" in resolved(hub, tmp_path)
        assert "config.json" in hub.sent and WEIGHTS not in hub.sent


def test_a_model_larger_than_the_cap_is_not_fetched(files: dict[str, bytes], tmp_path: Path) -> None:
    with serving(Hub(files, said={WEIGHTS: 1 << 40})) as hub:
        assert "the limit is 1,000,000: download.max_bytes" in resolved(hub, tmp_path, max_bytes=1_000_000)
        assert WEIGHTS not in hub.sent


def test_a_hub_that_sends_more_than_it_says_is_cut_off(files: dict[str, bytes], tmp_path: Path) -> None:
    small = sum(map(len, files.values()))
    files[WEIGHTS] = bytes(64 << 20)
    with serving(Hub(files, said={WEIGHTS: 1000})) as hub:
        assert "download.max_bytes" in resolved(hub, tmp_path, max_bytes=2 * small)
        assert hub.sent[WEIGHTS] < 40 << 20


def test_a_config_that_is_too_large_is_not_fetched(files: dict[str, bytes], tmp_path: Path) -> None:
    with serving(Hub(files, said={"config.json": 1 << 30})) as hub:
        assert "config.json has 1,073,741,824 bytes" in resolved(hub, tmp_path, max_bytes=1 << 40)
        assert not hub.sent


@pytest.mark.parametrize("text", ["a/b", "a/b@main", "a/b@v1.0", "a/b@refs/pr/1", f"a/b@{COMMIT}", "A-1/b.c_d@x-y"])
def test_ids_and_revisions(text: str) -> None:
    assert HubId.parse(text) is not None


@pytest.mark.parametrize(
    "text",
    ["a", "a/b/c", "a/b@", "a/b@/x", "a/b@x/", "a/b@x//y", "a/b@../x", "a/b@x/../y", "a/b@.git", "a/b@x/.y", "a/b@x..y",
     "a/b@x\n", "a/b\n@x", "a/b@-r", "a/b@x/./y",
     "../b", "a/..", "a--b/c", ".a/b", "-a/b", "a/b@x y", "a/b@é", "a/b@" + "x" * 200],
)  # fmt: skip
def test_what_is_none(text: str) -> None:
    assert HubId.parse(text) is None


def test_a_repository_of_the_cache_may_be_a_link_to_another_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, disk, cache = "0" * 40, tmp_path / "disk" / "tiny", tmp_path / "hub"
    for name, content in (("refs/main", commit), (f"snapshots/{commit}/config.json", "{}")):
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        (disk / name).write_text(content)
    cache.mkdir()
    (cache / "models--org--tiny").symlink_to(disk)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub_id = HubId.parse("org/tiny")
    assert hub_id is not None
    assert snapshot(hub_id, ("config.json",), 1 << 20).holds("config.json")
