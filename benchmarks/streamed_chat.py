"""How soon a streamed chat begins: the first text, beside the whole answer streamed and not streamed.

    python -m benchmarks.streamed_chat [--tokens 256] [--rounds 10] [--hidden 512] [--out FILE.json]

Starts `longshore dev` in a temporary folder, with an untrained model of random weights (4 layers, float32) that answers
by its name, and asks it for chats of so many tokens (`ignore_eos`) over HTTP, one at a time. Each round asks twice with
the same seed: streamed, then not. The first answers start the sampler and do not count. Prints JSON: medians in
seconds.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.control_plane import stack
from benchmarks.machine import provenance
from benchmarks.sampler import make_model

_MODEL = "random/model"
_WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    about = provenance()
    with tempfile.TemporaryDirectory() as folder:
        root, model = Path(folder) / "stack", make_model(Path(folder) / "model", "qwen3", arguments.hidden)
        models = json.dumps({_MODEL: str(model)})
        with stack(root, LONGSHORE_TINKER__MODELS=models) as connection:
            headers = {"authorization": f"Bearer {connection.api_key}"}
            with httpx.Client(base_url=connection.api_url, headers=headers, timeout=600) as client:
                rounds = [_round(client, seed, arguments.tokens) for seed in range(_WARM_UP + arguments.rounds)]
    medians = {name: round(statistics.median(r[name] for r in rounds[_WARM_UP:]), 3) for name in rounds[0]}
    result = {
        "what": f"seconds to a chat's first text and to its end, {arguments.tokens} tokens, hidden {arguments.hidden}",
        **medians,
        "whole_over_first_text": round(medians["not_streamed"] / medians["first_text"], 1),
        **about,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


def _round(client: httpx.Client, seed: int, tokens: int) -> dict[str, float]:
    """Ask the same twice. Returns seconds."""
    asked = {
        "model": _MODEL,
        "messages": [{"role": "user", "content": "Which crane lifts crate 7?"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": seed,
    }
    began, first, streamed = time.perf_counter(), None, ""
    with client.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            new = "".join(choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"])
            if new and first is None:
                first = time.perf_counter() - began
            streamed += new
    ended = time.perf_counter() - began
    began = time.perf_counter()
    whole = client.post("/v1/chat/completions", json=asked).raise_for_status().json()
    not_streamed = time.perf_counter() - began
    assert first is not None and streamed == whole["choices"][0]["message"]["content"]
    return {"first_text": first, "streamed": ended, "not_streamed": not_streamed}


if __name__ == "__main__":
    main()
