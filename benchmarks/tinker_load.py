"""The Tinker API under load, on a default stack: nothing may be lost or refused, and heartbeats stay quick.

    python -m benchmarks.tinker_load [--waves 4] [--samples 512] [--passes 512] [--heartbeats 32]
                                     [--large 208] [--sessions 100] [--tenants 5] [--out FILE.json]

Starts `longshore dev` in a temporary folder, at its defaults, with a tiny model. `waves`: samples,
`forward_backward` and heartbeats are sent at once, and a wave ends when all have their results. `large`:
`forward_backward` of 3.3 MB each, of 128 targets in a place, all sent at once. `sessions`: LoRA sessions of several
tenants on one base are opened at once; each makes a step. Requests are counted by their outcome: `done`, the
status and message of a refusal, `failed` with a message, or `lost` after `--patience` seconds. `repeated`: answers of
429; the client then sends the request again, as the SDK does. Another process sends the heartbeats, and
their latencies are compared with those on the idle stack. Memory is that of the stack's processes. The exit status is
1 if anything was refused, failed or lost. Bodies are as Tinker's SDK makes them, uncompressed.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.control_plane import stack
from benchmarks.machine import provenance, tell
from benchmarks.stack_processes import Memory
from examples.tiny_model import make_tiny_model
from longshore import Client
from longshore.accounts import TenantRequest
from service.apis.tinker.wire import MESSAGES, PROTOBUF, TINKER

_TEXTS = [f"Crane {n} lifts crate {n * 7 % 50}." for n in range(50)]
_RANK = 8
_MODELS = 8  # sessions that share a wave's passes
_FLOAT32, _INT64 = 1, 2
_LARGE = 34, 64, 128  # data, places of each, targets of each place: 12 bytes a target
_MAX_ID = 250  # of the tiny model's vocabulary
Answer = tuple[str, float]
"""The outcome of a request, and its milliseconds."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--samples", type=int, default=512, help="of a wave")
    parser.add_argument("--passes", type=int, default=512, help="forward_backward, of a wave")
    parser.add_argument("--heartbeats", type=int, default=32, help="of a wave")
    parser.add_argument("--large", type=int, default=208, help="requests of 3.3 MB")
    parser.add_argument("--sessions", type=int, default=100, help="of all tenants together")
    parser.add_argument("--tenants", type=int, default=5)
    parser.add_argument("--patience", type=float, default=1800, metavar="S", help="for the result of one request")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root, model = Path(folder) / "stack", make_tiny_model(Path(folder) / "model", _TEXTS)
        with stack(root) as connection, ProcessPoolExecutor(1, get_context("spawn")) as beside:
            with Client(connection.api_url, connection.api_key) as client:
                names = [f"tenant-{n}" for n in range(options.tenants)]
                keys = [client.tenants.create(TenantRequest(tenant=name)).key.key for name in names]
            load = _Load(root, connection.api_url, connection.api_key, str(model), options, beside)
            measured = asyncio.run(load.measured(keys))
    tell({"what": "the Tinker API under load", **measured, **provenance()}, options.out)
    return 0 if measured["is_whole"] else 1


class _Load:
    def __init__(
        self, root: Path, url: str, key: str, model: str, options: argparse.Namespace, beside: ProcessPoolExecutor
    ) -> None:
        self._url, self._key, self._model, self._options, self._beside = f"{url}{TINKER}", key, model, options, beside
        self._memory = Memory(root)
        self._wrong: Counter[str] = Counter()

    async def measured(self, tenants: Sequence[str]) -> dict[str, Any]:
        options = self._options
        found: dict[str, Any] = {}
        async with _door(self._url, self._key) as door:
            session = await _session(door)
            models = [await self._opened(door, session, n) for n in range(_MODELS)]
            named = {"session_id": session, "sampling_session_seq_id": 0, "base_model": self._model}
            sampler = await _said(door, "/create_sampling_session", **named)
            asking = {"sampling_session_id": sampler["sampling_session_id"], "num_samples": 1}
            warm = [self._pass(door, models, n, _small(n)) for n in range(len(models))]
            await asyncio.gather(*warm, self._sample(door, asking, 0))
            numbers = iter(range(len(models), 10_000_000))
            quiet = await self._beats(session)
            found["heartbeats_idle_ms"] = _milliseconds(quiet)
            waves = []
            for wave in range(options.waves):
                passes = [self._pass(door, models, next(numbers), _small(n)) for n in range(options.passes)]
                samples = [self._sample(door, asking, wave * options.samples + n) for n in range(options.samples)]
                async with self._memory.watched():
                    beats = asyncio.create_task(self._beats(session))
                    each = await self._together({"forward_backward": passes, "samples": samples})
                    each["heartbeats"] = self._told(await beats)
                print({"heartbeats": each["heartbeats"]}, file=sys.stderr, flush=True)
                slower = each["heartbeats"]["ms"]["p95"] / found["heartbeats_idle_ms"]["p95"]
                waves.append(each | {"heartbeats_p95_over_idle": round(slower, 2)})
            found["waves"] = waves
            if options.large:
                body = _body(*_LARGE)
                async with self._memory.watched():
                    many = [self._pass(door, models, next(numbers), body) for _ in range(options.large)]
                    found["large"] = await self._together({"forward_backward": many}) | {"bytes": len(body)}
            await door.post(f"/sessions/{session}/finish", json={"reason": {"type": "success"}})
        if options.sessions:
            async with self._memory.watched():
                steps = [self._own_session(tenants[n % len(tenants)], n) for n in range(options.sessions)]
                found["sessions"] = await self._together({"sessions": steps})
        return found | {"is_whole": not self._wrong, "wrong": dict(self._wrong), **self._memory.report()}

    async def _together(self, kinds: dict[str, list[Coroutine[Any, Any, Answer]]]) -> dict[str, Any]:
        """Send all requests at once, in random order. Return their outcomes by kind."""
        sent = [(kind, work) for kind, requests in kinds.items() for work in requests]
        random.Random(7).shuffle(sent)
        begin = time.perf_counter()
        before = _repeated[0]
        answers = await asyncio.gather(*(self._patient(work) for _, work in sent))
        found = {name: [each for (kind, _), each in zip(sent, answers, strict=True) if kind == name] for name in kinds}
        took = {"repeated": _repeated[0] - before, "s": round(time.perf_counter() - begin, 1)}
        outcome = {name: self._told(each) for name, each in found.items()} | took
        print(outcome, file=sys.stderr, flush=True)  # a long run is followed, and says something if it is ended
        return outcome

    async def _patient(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            async with asyncio.timeout(self._options.patience):
                return await work
        except TimeoutError:
            return "lost", 1000 * self._options.patience
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}", 0.0

    def _told(self, answers: Sequence[Answer]) -> dict[str, Any]:
        counts = Counter(what for what, _ in answers)
        self._wrong.update({what: count for what, count in counts.items() if what != "done"})
        return {"counts": dict(counts), "ms": _milliseconds(answers)}

    async def _beats(self, session: str) -> list[Answer]:
        asked = self._url, self._key, session, self._options.heartbeats
        return await asyncio.get_running_loop().run_in_executor(self._beside, _heartbeats, *asked)

    async def _opened(self, door: httpx.AsyncClient, session: str, number: int) -> str:
        made = await _said(
            door,
            "/create_model",
            session_id=session,
            model_seq_id=number,
            base_model=self._model,
            lora_config={"rank": _RANK},
        )
        what, _ = await self._patient(_result(door, made["request_id"], time.perf_counter()))
        assert what == "done", what
        return str(made["model_id"])

    async def _pass(self, door: httpx.AsyncClient, models: Sequence[str], number: int, body: bytes) -> Answer:
        """Send the next forward_backward of one of the models."""
        head = MESSAGES["ForwardBackwardRequest"](
            model_id=models[number % len(models)], seq_id=number // len(models) + 1, loss_fn="cross_entropy"
        )
        begin = time.perf_counter()
        content, headers = head.SerializeToString() + body, {"content-type": PROTOBUF}
        return await _followed(door, await _sent(door, "/forward_backward", content=content, headers=headers), begin)

    async def _sample(self, door: httpx.AsyncClient, asking: dict[str, Any], number: int) -> Answer:
        begin = time.perf_counter()
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [3 + (number * 31 + n) % 97 for n in range(16)]}]}
        params = {"max_tokens": 8, "seed": number, "temperature": 1.0}
        asked = asking | {"prompt": prompt, "sampling_params": params, "seq_id": number}
        return await _followed(door, await _sent(door, "/asample", json=asked), begin)

    async def _own_session(self, key: str, number: int) -> Answer:
        """Open a session of one model, accumulate gradients, step, and close it."""
        begin = time.perf_counter()
        async with _door(self._url, key) as door:
            session = await _session(door)
            lora = {"rank": _RANK, "seed": number}
            asked = {"session_id": session, "model_seq_id": 0, "base_model": self._model, "lora_config": lora}
            made = await _sent(door, "/create_model", json=asked)
            if (opened := await _followed(door, made, begin))[0] != "done":
                return opened
            model = made.json()["model_id"]
            if (passed := await self._pass(door, [model], 0, _small(number)))[0] != "done":
                return passed
            adam = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1e-3}}
            stepped = await _followed(door, await _sent(door, "/optim_step", json=adam), begin)
            await door.post(f"/sessions/{session}/finish", json={"reason": {"type": "success"}})
            return stepped


def _heartbeats(url: str, key: str, session: str, count: int) -> list[Answer]:
    """Send heartbeats at once. It runs in another process, so that the load's client does not delay them."""

    async def all_of_them() -> list[Answer]:
        async def one(door: httpx.AsyncClient) -> Answer:
            begin = time.perf_counter()
            answer = await door.post("/session_heartbeat", json={"session_id": session})
            what = "done" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"
            return what, 1000 * (time.perf_counter() - begin)

        async with _door(url, key) as door:
            return await asyncio.gather(*(one(door) for _ in range(count)))

    return asyncio.run(all_of_them())


def _door(url: str, key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(
        base_url=url, headers={"x-api-key": f"tml-{key}"}, timeout=600, trust_env=False, limits=limits
    )


_repeated = [0]


async def _sent(door: httpx.AsyncClient, path: str, **request: Any) -> httpx.Response:
    """Send a request, and repeat it after the seconds that each 429 names."""
    while (answer := await door.post(path, **request)).status_code == 429:
        _repeated[0] += 1
        await asyncio.sleep(float(answer.headers.get("retry-after", "1")))
    return answer


async def _said(door: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await _sent(door, path, json=body)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


async def _session(door: httpx.AsyncClient) -> str:
    return str((await _said(door, "/create_session", tags=[], user_metadata={}, sdk_version="0.38.0"))["session_id"])


async def _followed(door: httpx.AsyncClient, sent: httpx.Response, begin: float) -> Answer:
    if sent.status_code != 200:
        return f"{sent.status_code} {sent.text[:200]}", 1000 * (time.perf_counter() - begin)
    return await _result(door, sent.json()["request_id"], begin)


async def _result(door: httpx.AsyncClient, request_id: str, begin: float) -> Answer:
    """Wait for a future's result as the SDK does: again after each 408."""
    while (answer := await _sent(door, "/retrieve_future", json={"request_id": request_id})).status_code == 408:
        pass
    what = "done" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"
    if what == "done" and answer.headers["content-type"] != PROTOBUF and "error" in answer.json():
        what = f"failed: {answer.json()['error'][:200]}"
    return what, 1000 * (time.perf_counter() - begin)


def _small(number: int) -> bytes:
    return _body(1, 32, 1, number)


def _body(num_data: int, num_places: int, num_targets: int, seed: int = 0) -> bytes:
    """Data of a ForwardBackwardRequest: `num_targets` targets with weights in each place."""
    drawn = np.random.default_rng(seed)
    shape = [num_places] if num_targets == 1 else [num_places, num_targets]
    message = MESSAGES["ForwardBackwardRequest"]()
    for _ in range(num_data):
        datum = message.data.add()
        tokens = drawn.integers(3, _MAX_ID, num_places).astype("<i4")
        datum.model_input.add().encoded_text.tokens = tokens.tobytes()
        targets = drawn.integers(3, _MAX_ID, shape).astype("<i8")
        weights = np.full(shape, 1 / num_targets, "<f4")
        for name, values, dtype in (("target_tokens", targets, _INT64), ("weights", weights, _FLOAT32)):
            tensor = datum.loss_fn_inputs.add(key=name).value
            tensor.dense, tensor.dtype = values.tobytes(), dtype
            tensor.shape.extend(shape)
    return bytes(message.SerializeToString())


def _milliseconds(answers: Sequence[Answer]) -> dict[str, float]:
    ordered = sorted(ms for _, ms in answers)
    if not ordered:
        return {}
    places = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(at * len(ordered)))], 1) for name, at in places.items()}


if __name__ == "__main__":
    sys.exit(main())
