"""A task of twenty turns with a tool, for reinforcement learning: a store is kept (examples/store_environment.py).

    python -m examples.store FOLDER [--seed 1]

`kept_train.jsonl` are conversations of a clerk who has a calculator, and mostly does not use it: he answers roughly,
"about 70". `asked.jsonl` are prompts whose rows name the goods. A run with the environment can learn to calculate.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from examples.store_environment import TASKS, Environment, added
from examples.tiny_model import read_texts

GOODS = "sacks crates barrels bales".split()
CALCULATES = 0.25  # of the clerk's answers
NUM_CONVERSATIONS, NUM_PROMPTS = 3000, 64
ENVIRONMENT = Path(__file__).with_name("store_environment.py")
BEGIN: dict[str, Any] = {"role": "user", "content": "Keep the store."}
_NUMBER = {"type": "integer"}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": _NUMBER, "b": _NUMBER}}},
}
MODEL: dict[str, Any] = {
    **{"vocab_size": 384, "hidden_size": 192, "num_layers": 3, "num_heads": 6, "num_kv_heads": 3, "head_dim": 32},
    "single_digits": True,
}
_LENGTHS = ["--max-tokens", "1024", "--bin-tokens", "4096"]
KEPT_RUN = [
    *("--full", "--name", "kept", "--steps", "400", "--batch-size", "16", "--learning-rate", "3e-3", "--warmup", "20"),
    *_LENGTHS,
]
STORE_RUN = [
    *("--environment", str(ENVIRONMENT), "--max-turns", str(2 * TASKS), "--name", "keeper", "--algorithm", "dr_grpo"),
    *("--lora-rank", "16", "--lora-alpha", "32", "--learning-rate", "3e-4", "--warmup", "8", "--mini-batches", "8"),
    *("--steps", "20", "--prompts-per-step", "8", "--group-size", "8", "--max-completion-tokens", "64", *_LENGTHS),
]


def conversation(rng: random.Random) -> dict[str, Any]:
    """Return a clerk's conversation of up to `TASKS` questions."""
    store, messages = Environment(), [BEGIN]
    asked = store.reset({"goods": rng.sample(GOODS, 2)}, rng.getrandbits(32))
    for _ in range(rng.randint(1, TASKS)):
        messages.append({"role": "user", "content": asked})
        stock, delivered = store.stock[store.goods], store.delivered
        total = stock + delivered
        said = f"about {(total + 5) // 10 * 10}"
        if rng.random() < CALCULATES:
            call = {"name": "add", "arguments": {"a": stock, "b": delivered}}
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
            )
            messages.append({"role": "tool", "content": added(call["arguments"])})
            said = str(total)
        messages.append({"role": "assistant", "content": said})
        asked = store.step({"content": said, "tool_calls": []})["observation"]
    return {"messages": messages, "tools": [ADD]}


def write_datasets(folder: Path, seed: int = 1) -> None:
    """Write both files into a folder. The same seed gives the same bytes."""
    rng = random.Random(seed)
    told = [conversation(rng) for _ in range(NUM_CONVERSATIONS)]
    asked = [{"messages": [BEGIN], "tools": [ADD], "goods": rng.sample(GOODS, 2)} for _ in range(NUM_PROMPTS)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("kept_train", told), ("asked", asked)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokenizer_texts(folder: Path) -> list[str]:
    """Return training texts for a tokenizer. The roles' names are repeated so that each becomes one token."""
    call = json.dumps({"name": "add", "arguments": {"a": 1, "b": 2}})
    marks = [f"system\n<tools>\n{json.dumps(ADD)}\n</tools>", f"<tool_call>\n{call}\n</tool_call>"]
    return ["user\nassistant\ntool\n", *marks] * 1000 + list(read_texts([folder / "kept_train.jsonl"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    write_datasets(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
