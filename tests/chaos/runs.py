"""Seven kinds of runs of a tiny model, what a client does for its own, and the hash of what each of them leaves."""

import hashlib
import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from longshore.layout import Layout
from longshore.losses import PPO
from longshore.training import Full, Lora
from service.cli.client import CliClient
from service.cli.render import Stop, Unreachable
from service.dev.connection import Connection
from service.runs.views import RunView
from shared.runs.dataset_runs import DatasetSource, DPORun, SFTRun
from shared.runs.requests import RLRun, Run
from tests.activities.groups import random_groups
from tests.end_to_end.conftest import LETTERS

T = TypeVar("T")
CLIENT_DRIVEN = "client-driven RL"
_ASK_AGAIN_S = 0.3
_SILENT_S = 20.0


def seven_kinds(model: Path, folder: Path, size: int = 1) -> dict[str, Run]:
    """What is submitted at once, by what it shows. `size`: a multiple of the fewest steps that make sense."""
    chats, pairs, prompts = _write_data(folder)
    common = {"model": str(model), "batch_size": 16, "max_tokens": 128, "seed": 7, "checkpoint_every": 3}
    sft = {**common, "dataset": chats, "learning_rate": 0.01, "steps": 9 * size}
    lora = Lora(rank=4)
    rl = {"model": str(model), "trainable": lora, "learning_rate": 0.01, "max_tokens": 64, "seed": 7, "idle_s": 5}
    rollouts = {
        "prompts": prompts,
        "grader": LETTERS,
        "steps": 2 * size,
        "prompts_per_step": 6,
        "group_size": 4,
        "max_completion_tokens": 16,
    }

    def sampled(ahead: int) -> RLRun:
        return RLRun.model_validate({**rl, "rollouts": {**rollouts, "off_policy_steps": ahead}, "loss": PPO()})

    return {
        "LoRA on two ranks": SFTRun.model_validate({**sft, "trainable": lora, "layout": Layout(dp=2)}),
        "full training": SFTRun.model_validate({**sft, "trainable": Full(), "learning_rate": 0.001}),
        "evaluations and checkpoints": SFTRun.model_validate(
            {**sft, "trainable": lora, "eval_dataset": chats, "eval_every": 4, "num_samples": 1, "sample_tokens": 8}
        ),
        "DPO": DPORun.model_validate({**common, "dataset": pairs, "trainable": lora, "steps": 6 * size}),
        "on-policy RL": sampled(0),
        "off-policy RL": sampled(1),
        CLIENT_DRIVEN: RLRun.model_validate({**rl, "loss": PPO(), "mini_batches": 2}),
    }


def _write_data(folder: Path) -> tuple[DatasetSource, DatasetSource, DatasetSource]:
    def rows(name: str, row: Callable[[int], dict]) -> DatasetSource:
        path = folder / name
        path.write_text("".join(json.dumps(row(number)) + "\n" for number in range(64)))
        return DatasetSource(uri=path.as_uri())

    def question(number: int) -> dict:
        return {"role": "user", "content": f"How many crates are on quay {number}?"}

    def answer(number: int) -> dict:
        return {"role": "assistant", "content": f"{number * 7 % 50} crates."}

    return (
        rows("chats.jsonl", lambda n: {"messages": [question(n), answer(n)]}),
        rows(
            "pairs.jsonl",
            lambda n: {
                "input": {"messages": [question(n)]},
                "preferred_output": [answer(n)],
                "non_preferred_output": [{"role": "assistant", "content": f"A sack of grain, or {n % 9}."}],
            },
        ),
        rows("prompts.jsonl", lambda n: {"messages": [question(n)]}),
    )


def patiently(root: Path, ask: Callable[[CliClient], T], patience_s: float) -> T:
    """Ask a stack that may be down, or go down under the question, until it answers."""
    deadline = time.monotonic() + patience_s
    while True:
        connection = Connection.read(root)
        assert connection is not None
        with CliClient(connection.api_url, connection.api_key, timeout_s=_SILENT_S) as client:
            try:
                return ask(client)
            except Unreachable:
                if time.monotonic() > deadline:
                    raise
        time.sleep(_ASK_AGAIN_S)


def submit(root: Path, run: Run, patience_s: float) -> str:
    key = uuid.uuid4().hex
    return patiently(root, lambda client: client.submit(run, key), patience_s).run_id


def drive(root: Path, run_id: str, folder: Path, num_steps: int, patience_s: float) -> None:
    """A client's part: a step at a time, each sent until it is done, and the end."""
    for number in range(1, num_steps + 1):
        groups = folder / f"groups-{number}.jsonl"
        groups.write_text("".join(json.dumps(one) + "\n" for one in random_groups(seed=number)))
        uri, deadline = groups.as_uri(), time.monotonic() + patience_s
        sent = patiently(root, lambda client: client.train_step(run_id, f"key-{number}", uri), patience_s)  # noqa: B023
        while sent.state not in ("done", "failed"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {number} of {run_id} is {sent.state} after {patience_s:g} s")
            time.sleep(_ASK_AGAIN_S)
            sent = patiently(root, lambda client: client.step(run_id, sent.step), patience_s)  # noqa: B023
        assert sent.state == "done", sent
    try:
        patiently(root, lambda client: client.change(run_id, "finish"), patience_s)
    except Stop:  # refused where an answer was lost: it has ended
        ended(root, run_id, patience_s)


def ended(root: Path, run_id: str, patience_s: float) -> RunView:
    """The run as it has ended."""
    deadline = time.monotonic() + patience_s
    while (view := patiently(root, lambda client: client.run(run_id), patience_s)).state == "running":
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run_id} is {view.phase} at step {view.step} after {patience_s:g} s")
        time.sleep(_ASK_AGAIN_S)
    return view


def weights_sha256(view: RunView) -> str:
    """Of all weights that a run has published last."""
    assert view.state == "succeeded", view
    assert view.adapter is not None
    folder = Path(view.adapter.removeprefix("file://"))
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
