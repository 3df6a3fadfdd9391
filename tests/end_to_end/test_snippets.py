"""Every Python and shell snippet of the documentation is run, or stands in a list here with the reason why not."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from service.dev import Connection, Ports
from tests.art_clients import VERSIONS, run_with_art
from tests.end_to_end.stack import Stack
from tests.end_to_end.test_art import wandb

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv" / "clients"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
LANGUAGES = ("python", "sh", "bash")
# First words of indented blocks that ought to be fenced, so that they are found here.
COMMANDS = "longshore|curl|export|pip|make|python|git|helm|cp|torchrun|import|from|client|await|sudo|podman"

# By page and the beginning of the snippet's first line.
NOT_RUN = {
    "docs/agents.md: from longshore": "tests/end_to_end/test_episodes.py trains agents so",
    "docs/agents.md: class Environment": "tests/end_to_end/test_environments.py plays it",
    "docs/agents.md: longshore submit rl": "tests/end_to_end/test_environments.py trains so",
    "docs/backup.md: sqlite3": "tests/service/test_backup.py saves and restores both databases as this page says",
    "CONTRIBUTING.md: git clone": "the repository has no public address yet; `make setup` made this environment",
    "CONTRIBUTING.md: make check": "this is run by them",
    "README.md: make demo": "tests/examples/test_demo.py does it step by step; `make test` runs this",
    "docs/datasets.md: longshore submit sft": "tests/end_to_end/test_mixtures.py submits mixtures so",
    "docs/first_run.md: make setup": "it made this environment",
    "docs/inference.md: OPENAI_API_KEY": "tests/end_to_end/test_lm_eval.py runs it, with a local task",
    "docs/install.md: pip install": "infra/check_wheel.sh installs the wheel, in CI",
    "docs/install.md: make wheel": "infra/check_wheel.sh does it, in CI",
    "docs/job_protocol.md: LONGSHORE_WORKER_ID": "a host starts workers so: every run of these tests",
    "docs/job_protocol.md: torchrun": "tests/megatron_worker/test_protocol.py runs an archived job again so",
    "docs/kubernetes.md: helm install": "there is no cluster here; tests/infra/test_helm.py renders the chart",
    "docs/leaving_openai.md: export OPENAI_API_KEY": "it needs an account; tests/service/test_import_openai.py has one",
    "docs/observability.md: longshore profile": "tests/end_to_end/test_secrets.py runs it beside a run",
    "docs/operations.md: cp infra/env.example": "there are no containers here",
    "docs/local.md: from longshore": "tests/end_to_end/test_local.py trains so, by examples/local_sft.py",
    "docs/local.md: python examples/local_sft.py": "tests/end_to_end/test_local.py runs them",
    "docs/rollouts.md: longshore submit rl": "tests/end_to_end/test_local.py trains on two sources",
    "docs/sampler.md: python -P -m longshore.server": "tests/megatron_worker/test_sampler_sleep.py starts it",
    "docs/schedules_and_webhooks.md: longshore webhook create": "example.org has no address here",
    "docs/schedules_and_webhooks.md: longshore api PATCH": "tests/service/test_hooks_cli.py does",
    "docs/team_install.md: ": "tests/end_to_end/test_team_install.py follows the page",
    "docs/tinker_api.md: export LONGSHORE_TINKER": "tests/end_to_end/test_tinker.py runs it on local data",
}


@dataclass(frozen=True)
class Snippet:
    page: str
    language: str
    text: str

    @property
    def key(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0].strip()}"


def snippets() -> Iterator[Snippet]:
    for path in PAGES:
        for indent, language, body in re.findall(r"^( *)```(\w+)\n(.*?)^ *```$", path.read_text(), re.M | re.S):
            text = re.sub(f"^{indent}", "", body, flags=re.M)
            if language in LANGUAGES:
                yield Snippet(path.relative_to(ROOT).as_posix(), language, text)


def of(page: str, language: str | None = None) -> list[str]:
    """The snippets of a page that are run, in order."""
    found = [each for each in snippets() if each.page == page and language in (None, each.language)]
    return [each.text for each in found if not _reason(each)]


def _reason(snippet: Snippet) -> str | None:
    return next((reason for key, reason in NOT_RUN.items() if snippet.key.startswith(key)), None)


RUN = (
    *(
        "README.md",
        "docs/art_api.md",
        "docs/client.md",
        "docs/first_run.md",
        "docs/inference.md",
        "docs/models.md",
        "docs/openai_api.md",
    ),
    *("docs/schedules_and_webhooks.md", "docs/sessions.md", "docs/sweeps.md", "docs/tinker_api.md"),
    "docs/trainer_rank.md",
)


def test_every_snippet_is_run_or_there_is_a_reason() -> None:
    found = list(snippets())
    missing = [each.key for each in found if not _reason(each) and each.page not in RUN]
    assert not missing, "run them in this file, or say why not"
    stale = [key for key in NOT_RUN if not any(each.key.startswith(key) for each in found)]
    assert not stale and all(of(page) for page in RUN)
    for path in PAGES:
        loose = re.findall(
            rf"^\n    ((?:{COMMANDS})\b.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), re.M
        )
        assert not loose, f"{path.name}: fence them, with their language"


@pytest.fixture(scope="module")
def place(stack: Stack, tiny_model: Path, chat_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> "Place":
    """Where the snippets are run: with a published model named harbour, and files of the names that they have."""
    folder = tmp_path_factory.mktemp("snippets")
    connection = stack.connection
    for name in ("train.jsonl", "held_out.jsonl", "your.jsonl", "your-prompts.jsonl"):
        (folder / name).write_text("".join(chat_dataset.read_text().splitlines(keepends=True)[:64]))
    (folder / "grader.json").write_text(
        '{"type": "python", "name": "half", "source": "def grade(sample, item):\\n    return 0.5"}'
    )
    made = Place(stack, folder, connection, tiny_model)
    stack.cli(
        *("submit", "sft", "--model", str(tiny_model), "--dataset", str(chat_dataset), "--name", "harbour"),
        *("--steps", "2", "--lora-rank", "4", "--max-tokens", "128", "--wait"),
    )
    return made


@dataclass(frozen=True)
class Place:
    stack: Stack
    folder: Path
    connection: Connection
    model: Path

    def filled(self, text: str, **others: str) -> str:
        """A snippet with this stack's address, key and model."""
        replaced = {
            "http://127.0.0.1:8484": self.connection.api_url,
            "ls-…": self.connection.api_key,
            "/models/qwen3": str(self.model),
            "Qwen/Qwen3-0.6B": str(self.model),
        }
        for old, new in (replaced | others).items():
            text = text.replace(old, new)
        assert "…" not in text.replace("# …", ""), text
        return text

    def shell(self, text: str, **more: str) -> str:
        told = {"LONGSHORE_API_URL": self.connection.api_url, "LONGSHORE_API_KEY": self.connection.api_key}
        return ran(
            ["bash", "-euo", "pipefail", "-c", text], self.folder, LONGSHORE_ROOT=str(self.stack.root), **told | more
        )

    def python(self, text: str, client: str | None = None) -> str:
        path = os.pathsep.join([*([str(CLIENTS / client)] if client else []), str(ROOT)])
        return ran([sys.executable, "-P", "-c", text], self.folder, PYTHONPATH=path, HF_HUB_OFFLINE="1")


def ran(command: list[str], cwd: Path, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LONGSHORE_")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=cwd,
        env=inherited | {"PATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=1800,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_first_run_works_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with Ports() as ports:
        port = ports.take(21_000 + os.getpid() % 1000)  # other tests' stacks have the usual one
    script = "\n".join(of("docs/first_run.md")).replace("dev --detach", f"dev --detach --port {port}")
    script = script.replace("longshore doctor\n", "longshore doctor || true\n")  # it fails where bfloat16 is slow, say
    try:
        told = ran(["bash", "-euo", "pipefail", "-c", script], tmp_path)
    finally:
        ran(["longshore", "dev", "--stop", "--root", "first/root"], tmp_path)
    assert "published: first:v1" in told and 'longshore chat first:v1 "…"' in told
    assert (tmp_path / "first/adapter/adapter_model.safetensors").exists()


def test_the_readme_s_commands(place: Place) -> None:
    [text] = of("README.md")
    text = re.sub(r"^source .*$", "", text, flags=re.M).replace("MODEL", str(place.model))
    text = re.sub(r"--steps \d+", "--steps 2 --max-tokens 128", text)
    text = text.replace("--grader", "--max-completion-tokens 8 --group-size 2 --prompts-per-step 2 --grader")
    assert place.shell(text).count("succeeded") == 2


@pytest.mark.parametrize("version", VERSIONS)
def test_art(place: Place, version: str, tmp_path: Path) -> None:
    first, train_sft = of("docs/art_api.md", "python")
    groups = "[group(model, reward) for reward in (0.0, 1.0)]"
    body = place.filled(first.replace("(…)", f"({groups})"), clerk=f"clerk-of-{version.replace('.', '-')}")
    body = body.replace("base_model=", f"base_path={str(tmp_path)!r}, base_model=")
    program = ART.format(body=body.replace("\n", "\n    "), sft=train_sft.strip())
    done = run_with_art(version, ["-c", program], tmp_path, 900, **wandb(place.connection))
    assert done.stdout.splitlines()[-1] == "step 2"


ART = """
import asyncio
question = {{"role": "user", "content": "How many crates are on quay 3?"}}

async def group(model, reward):
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=[question], n=2, max_tokens=8, temperature=1.0)
    return art.TrajectoryGroup(art.Trajectory(messages_and_choices=[question, choice], reward=reward + place)
        for place, choice in enumerate(answer.choices))

async def main():
    global art
    {body}
    example = art.Trajectory(messages_and_choices=[question, {{"role": "assistant", "content": "21."}}], reward=0.0)
    examples = 8 * [example]
    {sft}
    print("step", await model.get_step())

asyncio.run(main())
"""


def test_what_curl_asks(place: Place) -> None:
    [registers] = [each for each in of("docs/art_api.md", "sh") if each.startswith("curl")]
    told = place.shell(place.filled(registers).replace("curl", "curl -sf", 1))
    assert json.loads(told)["longshore"]["rank"] == 8
    [asks] = of("docs/inference.md")
    assert '"content"' in place.shell(asks.replace("curl", "curl -sf"))


def test_openai(place: Place) -> None:
    first, more = of("docs/openai_api.md")
    waits = 'import time\nwhile client.fine_tuning.jobs.retrieve(job.id).status != "succeeded": time.sleep(1)'
    first = re.sub(r"^# ….*$", waits, first, flags=re.M)
    more = more.replace("…", 'model="Qwen/Qwen3-0.6B", training_file=file.id')
    text = place.filled(f"{first}\nlater = {more}\nclient.fine_tuning.jobs.cancel(later.id)\nprint('done')")
    assert place.python(text, "openai-3") == "done\n"


def test_tinker(place: Place) -> None:
    [text] = [each for each in of("docs/tinker_api.md") if "import tinker" in each]
    inputs = '{"target_tokens": [2, 3], "weights": [1.0, 1.0]}'
    datum = f"tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs={inputs})"
    text = place.filled(text.replace("training.forward", f"data = [{datum}]\ntraining.forward"))
    # The client's own threads may abort its interpreter's end (SIGABRT behind the last line, seen once): it has none.
    end = "import os\nprint('done', flush=True)\nos._exit(0)"
    assert place.python(f"{text}\n{end}", "tinker-38") == "done\n"


def test_sessions(place: Place) -> None:
    [text] = of("docs/sessions.md")
    before = f"key = {place.connection.api_key!r}\nbatches = [[([1, 2, 3], [1, 1])]]\n"
    *losses, adapter = place.python(before + place.filled(text)).split()
    assert float(losses[0]) > 0 and adapter


def test_trainer_rank(place: Place) -> None:
    (place.folder / "model").symlink_to(place.model)
    before = """
import torch
from pathlib import Path
from torch import Tensor
from longshore.trainer_rank import train_head
ids, own_sequences, num_targets_of_all_ranks, num_targets = [1, 2, 3, 4], [[1, 2, 3, 4]], 3, 3
returns = torch.zeros(4)
"""
    start, reference, head, base, groups = of("docs/trainer_rank.md")
    between = """
rank.create_adapter("reference", Lora(rank=4), seed=1)
rank.create_adapter("critic", Lora(rank=4), seed=2)
inputs = [ForwardInput(ids, target_logprobs=True)]
groups, advantages = [[ForwardInput(ids, target_logprobs=True)]], [1.0]
loss = lambda outputs: -sum(output.target_logprob_P.sum() for output in outputs)
loss_of = lambda outputs, advantage: -advantage * sum(output.target_logprob_P.sum() for output in outputs)
"""
    loss = "loss = lambda outputs: -sum(output.target_logprob_P.sum() for output in outputs)"
    alone = 'for name in ("policy", "reference", "critic"): rank.drop_adapter(name)'
    base = base.replace('Path("model")', 'Path("trained")')
    text = "\n".join([before, start, between, reference, head, groups, loss, alone, base])
    place.python(text)
    assert (place.folder / "trained" / "config.json").exists()


def test_sweeps_and_schedules(place: Place) -> None:
    small = {
        "--steps 200": "--steps 2 --max-tokens 128",
        "--trials 16": "--trials 2",
        "s3://bucket/chats/": "train.jsonl",
    }
    [sweep] = of("docs/sweeps.md")
    assert "rates" in place.shell(place.filled(sweep, **small))
    [schedule] = of("docs/schedules_and_webhooks.md")
    place.shell(place.filled(schedule, **small))
    assert "nightly" in place.shell("longshore schedule ls; longshore schedule rm nightly")


def test_transformers(place: Place) -> None:
    [text] = of("docs/models.md")
    place.python(re.sub(r"^  ", "", text, flags=re.M))


def test_the_client(place: Place) -> None:
    first, second, third = (place.python(place.filled(text)) for text in of("docs/client.md"))
    assert first.startswith("succeeded") and (place.folder / "tides-adapter" / "adapter_model.safetensors").exists()
    assert "tides" in second and "started" in second.splitlines()
    assert "there is no run sft-none" in third
