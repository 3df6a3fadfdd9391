"""The demonstration: a tiny model learns a harbour's facts, then the radio's manner; another to add, then to be exact.

    make demo

Everything goes through the real system: a Temporal server, the web service, hosts, workers, samplers, published
artifacts. All runs are ordinary ones, started by the commands that are printed.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from examples import arithmetic
from examples.tiny_model import make_tiny_model, read_texts

ROOT = Path(".demo")
MODELS = ROOT / "models"  # opened to runs by name: nothing else of a stack's root is
DATA = Path(__file__).parent / "data"
NUM_SHOWN = 5

MODEL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 192,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 32,
}
COMMON = [
    *("--max-tokens", "128", "--bin-tokens", "1024", "--schedule", "linear", "--warmup", "10"),
    *("--samples", "8", "--sample-tokens", "24"),
]
BASE_RUN = ["--full", "--name", "harbour", "--epochs", "14", "--batch-size", "32", "--learning-rate", "3e-3", *COMMON]
RADIO_RUN = [
    *("--lora-rank", "16", "--lora-alpha", "32", "--name", "harbour-radio"),
    *("--epochs", "4", "--batch-size", "16", "--learning-rate", "3e-3", *COMMON),
]

console = Console()


def main() -> None:
    started = time.monotonic()
    model, clerk = make_model(MODELS / "harbour"), make_clerk(MODELS / "clerk")
    start_stack()
    base = train("1. every weight, on the facts of the harbour", model.absolute().as_uri(), DATA / "harbour", BASE_RUN)
    radio = train(
        "2. a LoRA adapter on what run 1 published, to answer by radio", base["adapter"], DATA / "radio", RADIO_RUN
    )
    exact = reinforce_arithmetic(clerk.absolute().as_uri(), ROOT / "sums")
    show_places(base, radio, exact)
    console.print(f"\nAll of it took {time.monotonic() - started:.0f} s.")


def reinforce_arithmetic(model: str, data: Path) -> dict[str, Any]:
    """A model that can add, an adapter that mostly rounds, and what reinforcement learning makes of it."""
    sums = train("3. every weight of another tiny model, on sums", model, data / "sums", arithmetic.SUMS_RUN)
    tally = train(
        "4. a LoRA adapter that mostly rounds, as clerks do", sums["adapter"], data / "tally", arithmetic.TALLY_RUN
    )
    return reinforce("5. the same adapter, rewarded for exact answers alone", sums["adapter"], tally["adapter"], data)


def make_model(folder: Path) -> Path:
    """A tiny Qwen3 model with random weights and a tokenizer, unless an earlier demonstration made it."""
    if not (folder / "config.json").exists():
        console.print("Making a tiny Qwen3 model: random weights, its own tokenizer and chat template.")
        make_tiny_model(folder, read_texts(sorted(DATA.glob("*.jsonl"))), **MODEL)
    return folder


def make_clerk(folder: Path) -> Path:
    """Another one, which sees every digit, and the data of its task."""
    arithmetic.write_datasets(ROOT / "sums")
    if not (folder / "config.json").exists():
        make_tiny_model(folder, arithmetic.tokenizer_texts(ROOT / "sums"), **arithmetic.MODEL)
    return folder


def start_stack() -> None:
    if is_up():
        console.print("The stack of an earlier demonstration is up.")
        return
    console.print("Starting the stack: Temporal, web service, hosts.")
    longshore("dev", "--detach", "--ui", "--root", str(ROOT), "--open", ".", "--open", str(MODELS))


def is_up() -> bool:
    """Whether the service of an earlier demonstration answers."""
    try:
        return httpx.get(f"{connection()['api_url']}/health", timeout=5).is_success
    except (OSError, httpx.TransportError):
        return False


def connection() -> dict[str, Any]:
    """How the stack of this root is reached, as it wrote it down."""
    return json.loads((ROOT / "dev.json").read_bytes())


def train(title: str, model: str, dataset: Path, options: list[str]) -> dict[str, Any]:
    """Supervised fine-tuning on DATASET_train.jsonl, with DATASET_eval.jsonl held out."""
    files = arithmetic.dataset_options(dataset.parent, dataset.name)
    run = _run(title, "sft", "--model", model, *files, *options)
    show_change([json.loads(line)["event"] for line in longshore("events", run["run_id"]).splitlines()])
    return run


def reinforce(title: str, model: str, adapter: str, data: Path) -> dict[str, Any]:
    """Reinforcement learning that continues from an adapter: the run samples, grades and trains by itself."""
    options = [*arithmetic.rollout_options(data), *arithmetic.EXACT_RUN]
    run = _run(title, "rl", "--model", model, "--initial-adapter", adapter, *options)
    show_rewards(steps_of(run))
    return run


def _run(title: str, *arguments: str) -> dict[str, Any]:
    """One run, from submission to its end, with its progress on stderr. Returns what `--json` printed."""
    console.rule(title)
    command = ["submit", *arguments, "--wait", "--json"]
    console.print("longshore", shlex.join(command), style="dim", highlight=False, soft_wrap=True)
    return json.loads(longshore(*command))


def steps_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The train steps of an RL run; the first one is the policy before any training."""
    return json.loads(longshore("steps", run["run_id"], "--json"))


def longshore(*arguments: str) -> str:
    """Run the command line and return its stdout; its stderr (progress, errors) goes to the terminal."""
    command = [str(Path(sys.executable).with_name("longshore")), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LONGSHORE_")}
    environment["LONGSHORE_ROOT"] = str(ROOT)
    environment["LONGSHORE_DTYPE"] = "float32"  # so that its figures are the same on every CPU
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"longshore {shlex.join(arguments[:2])} ended with status {done.returncode}; logs are in {ROOT}/logs")
    return done.stdout


def show_change(events: list[dict[str, Any]]) -> None:
    """Held-out loss and greedy completions, before the first step and after the last."""
    evaluations = [event for event in events if event["event"] == "evaluated"]
    before, after = evaluations[0], evaluations[-1]
    losses = [evaluation["metrics"]["loss"] for evaluation in (before, after)]
    console.print(f"held-out loss: {losses[0]:.3f} before, {losses[1]:.3f} after {after['step']} steps")
    table = Table("question", "before", "after", "reference", title="Greedy completions of held-out questions")
    for old, new in list(zip(before["samples"], after["samples"], strict=True))[:NUM_SHOWN]:
        cells = (question(old["prompt"]), old["completion"], new["completion"], new["reference"])
        table.add_row(*(shortened(cell) for cell in cells))
    console.print(table)


def show_rewards(steps: list[dict[str, Any]]) -> None:
    """The share of exact answers: of each step's samples, and of greedy answers to pairs that were never trained."""
    table = Table("step", "sampled", "held out, greedy", title="Exact answers")
    for step in steps:
        found = [step["metrics"].get(name) for name in ("reward_mean", "eval_reward_mean")]
        table.add_row(str(step["step"]), *("" if share is None else f"{share:.1%}" for share in found))
    console.print(table)


def question(prompt: str) -> str:
    """What the user said, without the chat template around it."""
    return prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]


def shortened(text: str, length: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def show_places(base: dict[str, Any], radio: dict[str, Any], exact: dict[str, Any]) -> None:
    stack = connection()
    console.rule("Where things are")
    for what, where in (
        ("model", base["adapter"]),
        ("adapter", radio["adapter"]),
        ("RL adapter", exact["adapter"]),
        ("page", f"{stack['api_url']} (sign in with the key in {ROOT}/dev.json)"),
        ("API", f"{stack['api_url']}/api/v1 (described by /api/v1/openapi.json; the same key)"),
        ("Temporal UI", stack["temporal_ui"]),
    ):
        console.print(f"{what:12}{where}", highlight=False, soft_wrap=True)
    console.print(
        f"\nTo look around: export LONGSHORE_ROOT={ROOT.resolve()}; .venv/bin/longshore ls",
        highlight=False,
        soft_wrap=True,
    )
    console.print("To stop the stack: make demo-stop", highlight=False)


if __name__ == "__main__":
    main()
