"""A task with checkable answers, for reinforcement learning: what two loads come to. Written by this script alone.

    python -m examples.arithmetic FOLDER [--seed 1]

    "27 sacks and 45?"    "72"

`sums_*.jsonl` teach a model to add, and to round when it is asked to ("27 sacks and 45, roughly?"). `tally_*.jsonl`
teach it a clerk's habit: most answers are rounded ("about 70"), though nobody asked for it.
`prompts_*.jsonl` are questions with the answer beside them, for runs that sample and grade; GRADER takes exact answers
alone, so what such a run can learn is to leave the habit. The pairs of numbers in `*_eval` files are in no `*_train`
file, in neither order.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from examples.tiny_model import read_texts
from longshore.grading import StringCheckGrader

Pair = tuple[int, int]

SMALLEST, LARGEST = 10, 49  # a sum has two digits too
NUM_HELD_OUT = 96  # pairs in both orders, hence not quite twice as many questions
ROUGHLY = 0.25  # of the sums that are taught
ROUNDED = 0.9  # of the tally's answers
GOODS = "sacks crates barrels bales".split()
GRADER = StringCheckGrader(
    name="exact sum", operation="eq", input="{{ sample.output_text }}", reference="{{ item.answer }}"
)

# The sizes of a model that can do it, and the options of three runs. Each continues from the previous adapter.
MODEL: dict[str, Any] = {
    **{"vocab_size": 320, "hidden_size": 192, "num_layers": 3, "num_heads": 6, "num_kv_heads": 3, "head_dim": 32},
    "single_digits": True,
}
_LENGTHS = ["--max-tokens", "64", "--bin-tokens", "2048"]
_SHOWN = ["--samples", "8", "--sample-tokens", "8"]
_LORA = ["--lora-rank", "16", "--lora-alpha", "32"]
SUMS_RUN = [
    *("--full", "--name", "sums", "--steps", "350", "--batch-size", "64", "--learning-rate", "3e-3", "--warmup", "20"),
    *(*_LENGTHS, *_SHOWN),
]
TALLY_RUN = [
    *(*_LORA, "--name", "tally", "--steps", "80", "--batch-size", "32", "--learning-rate", "6e-4", "--warmup", "5"),
    *(*_LENGTHS, *_SHOWN),
]
# Adam's steps are of one size whether the gradient says something or nothing. A deep habit and many small steps (eight
# of each 32 prompts) keep a run whose rewards say nothing where it began, and one whose rewards speak gets far.
EXACT_RUN = [
    *(*_LORA, "--name", "tally-exact", "--algorithm", "dr_grpo", "--learning-rate", "8e-5", "--warmup", "16"),
    *("--steps", "12", "--prompts-per-step", "32", "--group-size", "8", "--mini-batches", "8", "--eval-every", "4"),
    *("--max-completion-tokens", "8", *_LENGTHS),
]


def pairs(rng: random.Random) -> tuple[list[Pair], list[Pair]]:
    """All pairs in both orders, shuffled: those to train on, and those held out."""
    numbers = range(SMALLEST, LARGEST + 1)
    unordered = [(a, b) for a in numbers for b in numbers if a <= b]
    held_out = set(rng.sample(unordered, NUM_HELD_OUT))
    ordered = [(a, b) for a in numbers for b in numbers]
    rng.shuffle(ordered)
    train = [pair for pair in ordered if _smaller_first(pair) not in held_out]
    return train, [pair for pair in ordered if _smaller_first(pair) in held_out]


def question(pair: Pair, goods: str, ending: str = "?") -> str:
    return f"{pair[0]} {goods} and {pair[1]}{ending}"


def rounded(total: int) -> str:
    """The habit: to the nearest ten, halves upwards."""
    return f"about {(total + 5) // 10 * 10}"


def sums(of: Iterable[Pair], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Chats that answer exactly, and some that were asked not to."""
    for pair in of:
        yield _chat(question(pair, rng.choice(GOODS)), str(sum(pair)))
        if rng.random() < ROUGHLY:
            yield _chat(question(pair, rng.choice(GOODS), ", roughly?"), rounded(sum(pair)))


def tally(of: Iterable[Pair], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Chats that mostly round."""
    for pair in of:
        answer = rounded(sum(pair)) if rng.random() < ROUNDED else str(sum(pair))
        yield _chat(question(pair, rng.choice(GOODS)), answer)


def prompts(of: Iterable[Pair], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Questions for a policy to answer; GRADER compares with `answer`."""
    for pair in of:
        asked = {"role": "user", "content": question(pair, rng.choice(GOODS))}
        yield {"messages": [asked], "answer": str(sum(pair))}


def _chat(asked: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def _smaller_first(pair: Pair) -> Pair:
    return (min(pair), max(pair))


def dataset_options(folder: Path, name: str) -> list[str]:
    """Return options of `longshore submit sft`: the files of `sums` or `tally`."""
    return ["--dataset", f"{folder}/{name}_train.jsonl", "--eval-dataset", f"{folder}/{name}_eval.jsonl"]


def rollout_options(folder: Path) -> list[str]:
    """Return options of `longshore submit rl`: the prompts and the grader."""
    prompts = ["--prompts", f"{folder}/prompts_train.jsonl", "--eval-prompts", f"{folder}/prompts_eval.jsonl"]
    return [*prompts, "--grader", GRADER.model_dump_json()]


def tokenizer_texts(folder: Path) -> list[str]:
    """Return training texts for a tokenizer. The roles' names are repeated so that each becomes one token."""
    return ["user\nassistant\n"] * 100 + list(read_texts(sorted(folder.glob("*.jsonl"))))


def write_datasets(folder: Path, seed: int = 1) -> None:
    """Write the six files into a folder. The same seed gives the same bytes."""
    rng = random.Random(seed)
    train, held_out = pairs(rng)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (
        ("sums_train", sums(train, rng)),
        ("sums_eval", sums(held_out, rng)),
        ("tally_train", tally(train, rng)),
        ("tally_eval", tally(held_out, rng)),
        ("prompts_train", prompts(train, rng)),
        ("prompts_eval", prompts(held_out, rng)),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    write_datasets(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
