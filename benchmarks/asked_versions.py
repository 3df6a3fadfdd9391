"""Latency of the first question to a new version: sent by the trainer to the sampler, or read from the store.

    python -m benchmarks.asked_versions [--rank 256] [--rounds 10] [--hidden 1024] [--out FILE.json]

Starts `longshore dev` in a temporary folder and opens a session that trains an adapter of a model of random weights (4
layers, float32). Each round makes two versions, and then asks each for one token, over HTTP: first the newer one, which
the sampler has from the trainer; then the older one, which the newer one has replaced there, so that it is read from
the store; then the newer one again, which is loaded by then. The first answers start the sampler and do not count.
`save_s` is the time of a `save_state` with `publish`, weights sent or not. Prints JSON: medians in seconds.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from activities.sampling.client import Sampler
from benchmarks.control_plane import stack
from benchmarks.machine import provenance, tell
from benchmarks.one_device import samplers
from benchmarks.sampler import make_model
from longshore.client import Client, Session
from longshore.commands import Datum
from longshore.training import Lora, SessionRun

NAME = "asked"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    about = provenance()
    with tempfile.TemporaryDirectory() as folder:
        root, model = Path(folder) / "stack", make_model(Path(folder) / "model", "qwen3", arguments.hidden)
        with stack(root) as connection:
            headers = {"authorization": f"Bearer {connection.api_key}"}
            run = SessionRun(
                model=str(model), trainable=Lora(rank=arguments.rank), max_tokens=256, name=NAME, idle_s=600
            )
            with (
                Client(connection.api_url, connection.api_key) as client,
                httpx.Client(base_url=connection.api_url, headers=headers, timeout=600) as door,
            ):
                session = client.sessions.open(run)
                alone = [_version(session) for _ in range(arguments.rounds)]
                _ask(door, alone[-1][0])
                rounds = [_round(session, door, root) for _ in range(arguments.rounds)]
        files = root / "store" / "tenants" / "default" / "adapters" / NAME
        num_bytes = max(path.stat().st_size for path in files.rglob("adapter_model.safetensors"))
    result = {
        "what": "seconds until the first token of a version that nobody has asked before",
        "adapter_mb": round(num_bytes / 1e6, 1),
        **{name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]},
        "save_not_sent_s": round(statistics.median(seconds for _, seconds in alone), 3),
        **about,
    }
    tell(result, arguments.out)


def _round(session: Session, door: httpx.Client, root: Path) -> dict[str, float]:
    older, _ = _version(session)
    newer, save_s = _version(session)
    before = _sent(root)
    sent_s = _seconds(lambda: _ask(door, newer))
    from_trainer = _sent(root)
    assert from_trainer - before, "the newer version came from the store, too"
    stored_s = _seconds(lambda: _ask(door, older))
    assert not _sent(root) - from_trainer, "the older version came from the trainer, too"
    return {"sent_s": sent_s, "stored_s": stored_s, "served_s": _seconds(lambda: _ask(door, newer)), "save_s": save_s}


def _version(session: Session) -> tuple[str, float]:
    """Make and publish a version, a second after the one before. Returns its name, and how long saving took."""
    time.sleep(1)
    session.forward_backward([Datum(tokens=tuple(range(3, 35)))]).result(600)
    session.optim_step(learning_rate=1e-3).result(600)
    began = time.perf_counter()
    version = session.save_state(publish=True).result(600).version
    return f"{NAME}:v{version}", time.perf_counter() - began


def _ask(door: httpx.Client, model: str) -> None:
    asked = {"model": model, "prompt": "Which crane lifts crate 7?", "max_tokens": 1}
    answer = door.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text


def _seconds(do: Callable[[], None]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def _sent(root: Path) -> set[str]:
    """The adapters that the sampler has from a trainer: those without a folder."""
    [ready] = samplers(root)
    with Sampler(ready.url, ready.api_key, socket_path=ready.socket) as sampler:
        return {name for name, card in sampler.models().items() if card.parent and "/" not in (card.root or "/")}


if __name__ == "__main__":
    main()
