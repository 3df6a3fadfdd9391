"""Latency of a streamed chat through the service, compared with the sampler directly; and of many chats at once.

    python -m benchmarks.streamed_chat [--tokens 256] [--rounds 10] [--hidden 512] [--crowd 200] [--out FILE.json]

Starts `longshore dev` in a temporary folder, with a named model of random weights (4 layers, float32), and requests
chats of `--tokens` tokens (`ignore_eos`) over HTTP, one at a time. Each round has three requests with the same seed:
the service streamed, the service not streamed, and the sampler itself, streamed. `lag` is the extra delay of a
position of the text through the service. The first answers start the sampler and do not count. Then
`--crowd` clients ask at once, half of them of a second tenant, for 16 tokens each; a refused one (429) retries, as
clients do. Prints JSON: medians in seconds.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.control_plane import stack
from benchmarks.machine import provenance, tell
from benchmarks.sampler import make_model
from shared.chat.completions import SamplerReady
from shared.storage.files import reachable

_MODEL = "random/model"
_WARM_UP = 2
_MESSAGES = [{"role": "user", "content": "Which crane lifts crate 7?"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--crowd", type=int, default=200)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    about = provenance()
    with tempfile.TemporaryDirectory() as folder:
        root, model = Path(folder) / "stack", make_model(Path(folder) / "model", "qwen3", arguments.hidden)
        models = json.dumps({_MODEL: str(model)})
        with stack(root, LONGSHORE_TINKER__MODELS=models) as connection:
            headers = {"authorization": f"Bearer {connection.api_key}"}
            with httpx.Client(base_url=connection.api_url, headers=headers, timeout=600) as client:
                rounds = [_round(client, root, seed, arguments.tokens) for seed in range(_WARM_UP + arguments.rounds)]
                made = client.post("/api/v1/tenants", json={"tenant": "second"}).raise_for_status()
                keys = [connection.api_key, made.json()["key"]["key"]]
            crowd = asyncio.run(_crowd(connection.api_url, keys, arguments.crowd))
    medians = {name: round(statistics.median(r[name] for r in rounds[_WARM_UP:]), 4) for name in rounds[0]}
    result = {
        "what": f"seconds to a chat's first text and to its end, {arguments.tokens} tokens, hidden {arguments.hidden}",
        **medians,
        "first_text_beyond_the_sampler": round(medians["first_text"] - medians["sampler_first_text"], 4),
        f"crowd_of_{arguments.crowd}": crowd,
        "whole_over_first_text": round(medians["not_streamed"] / medians["first_text"], 1),
        **about,
    }
    tell(result, arguments.out)


def _round(client: httpx.Client, root: Path, seed: int, tokens: int) -> dict[str, float]:
    """Ask the same three times. Returns seconds."""
    asked = {"model": _MODEL, "messages": _MESSAGES, "max_tokens": tokens, "ignore_eos": True, "seed": seed}
    by_service = _streamed(client, "/v1/chat/completions", asked, lambda choice: choice["delta"].get("content"))
    began = time.perf_counter()
    whole = client.post("/v1/chat/completions", json={**asked, "return_token_ids": True}).raise_for_status().json()
    not_streamed = time.perf_counter() - began
    with sampler_of(root) as (sampler, name):
        direct = {**asked, "model": name, "prompt": whole["prompt_token_ids"]}
        del direct["messages"]
        by_sampler = _streamed(sampler, "/v1/completions", direct, lambda choice: choice["text"])
    text = whole["choices"][0]["message"]["content"]
    assert by_service[-1][1] == by_sampler[-1][1] == len(text)
    lags = sorted(_lags(by_service, by_sampler))
    return {
        "first_text": by_service[0][0],
        "sampler_first_text": by_sampler[0][0],
        "streamed": by_service[-1][0],
        "not_streamed": not_streamed,
        "lag_p50": lags[len(lags) // 2],
        "lag_p95": lags[int(len(lags) * 0.95)],
    }


def _streamed(
    client: httpx.Client, path: str, asked: dict[str, Any], text_of: Callable[[dict[str, Any]], str | None]
) -> list[tuple[float, int]]:
    """Ask for a stream. Returns when how many characters were there, in seconds from the request on."""
    began, length, seen = time.perf_counter(), 0, list[tuple[float, int]]()
    with client.stream("POST", path, json={**asked, "stream": True}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                new = "".join(text_of(choice) or "" for choice in json.loads(line[6:])["choices"])
                length += len(new)
                if new:
                    seen.append((time.perf_counter() - began, length))
    return seen


def _lags(late: list[tuple[float, int]], early: list[tuple[float, int]]) -> Iterator[float]:
    """Delay of each position of a text: that of the first chunk that contains it."""
    chunks = iter(late)
    at, length = next(chunks)
    for drawn_at, place in early:
        while length < place:
            at, length = next(chunks)
        yield at - drawn_at


@contextmanager
def sampler_of(root: Path) -> Iterator[tuple[httpx.Client, str]]:
    """The sampler that has answered last, asked directly, and its model's name."""
    [file] = (root / "workers").glob("*/ready")
    ready = SamplerReady.model_validate_json(file.read_bytes())
    headers = {"authorization": f"Bearer {ready.api_key}"}
    with ExitStack() as stack:
        uds = stack.enter_context(reachable(Path(ready.socket))) if ready.socket else None
        transport = httpx.HTTPTransport(uds=uds)
        client = httpx.Client(base_url=ready.url, headers=headers, timeout=600, transport=transport)
        yield stack.enter_context(client), ready.model


async def _crowd(url: str, keys: list[str], num: int) -> dict[str, float]:
    """Ask chats at once, in turn by each key. Returns seconds: until all had answers, and each tenant's median."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        began = time.perf_counter()

        async def ask(number: int) -> float:
            headers = {"authorization": f"Bearer {keys[number % len(keys)]}"}
            asked = {"model": _MODEL, "messages": _MESSAGES, "max_tokens": 16, "ignore_eos": True, "seed": number}
            while True:
                answer = await client.post("/v1/chat/completions", json=asked, headers=headers)
                if answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
                    answer.raise_for_status()
                    return time.perf_counter() - began
                await asyncio.sleep(1)

        ended = await asyncio.gather(*map(ask, range(num)))
    halves = {f"tenant_{each + 1}_p50": statistics.median(ended[each :: len(keys)]) for each in range(len(keys))}
    return {name: round(seconds, 2) for name, seconds in {"all": max(ended), **halves}.items()}


if __name__ == "__main__":
    main()
