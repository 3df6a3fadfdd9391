"""Overhead of a session's command beyond its computation, on a warm stack.

    python -m benchmarks.session [--commands 100] [--tinker | --s3 MILLISECONDS]

Starts `longshore dev` in a temporary folder, opens a session of a tiny model, and sends commands one by one, each after
the previous one's result: forwards and steps. It compares the time from the client's call to its result with that of
the same call in-process: parse, pack, forward. The first commands warm the worker up and do not count. It also measures
the time until an idle session, which has given its worker back, answers again; and commands sent without waiting. With
`--tinker` it measures Tinker's own SDK on the Tinker API instead. With `--s3` the store is an S3 server that takes this
long for each request; the stack's requests per second are counted without a session, while one is idle with its worker,
and while its client waits for a result, and the requests per command while it works. Prints JSON.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.control_plane import stack
from benchmarks.machine import provenance
from examples.tiny_model import make_tiny_model
from longshore.client import Client, Pending, Session
from longshore.commands import Datum, Forward
from longshore.training import Lora, SessionRun
from service.dev import Connection
from shared.jobs.commands import read_command, stored_form

TOKENS = 64
_WARM_UP = 10
_SDK = ".venv/clients/tinker-38"
_CORPUS = [f"Crane {n} lifts crate {n * 7 % 50}." for n in range(50)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", type=int, default=100)
    parser.add_argument("--tinker", action="store_true", help="by Tinker's own SDK (requirements/clients.sh)")
    parser.add_argument("--s3", type=float, metavar="MILLISECONDS", help="that each request to the store takes")
    arguments = parser.parse_args()
    num_commands = arguments.commands
    with tempfile.TemporaryDirectory() as folder, ExitStack() as after:
        root, model = Path(folder) / "stack", make_tiny_model(Path(folder) / "model", _CORPUS)
        s3 = after.enter_context(_s3(arguments.s3 / 1000)) if arguments.s3 is not None else None
        with stack(root, **(s3.settings if s3 else {})) as connection:
            if s3 is not None:
                with Client(connection.api_url, connection.api_key) as client:
                    figures = _requests(client, model, s3, num_commands)
            elif arguments.tinker:
                figures = _tinker(connection, model, num_commands)
            else:
                with Client(connection.api_url, connection.api_key) as client:
                    figures = _measure(client, model, num_commands)
        in_process = _in_process(model, num_commands)
    result: dict[str, object] = {
        "what": "milliseconds from a command's call to its result, on a warm worker",
        "tokens": TOKENS,
        "in_process_forward": in_process,
        **figures,
        **provenance(),
    }
    print(json.dumps(result, indent=1))


def _measure(client: Client, model: Path, num_commands: int) -> dict[str, object]:
    session = client.sessions.open(SessionRun(model=str(model), trainable=Lora(rank=8), max_tokens=TOKENS, idle_s=1))
    data = [Datum(tokens=tuple(range(3, 3 + TOKENS)))]
    for _ in range(_WARM_UP):
        session.forward(data).result(600)
    forwards = _times(num_commands, lambda: session.forward(data))
    gradients = _times(num_commands, lambda: session.forward_backward(data))
    steps = _times(num_commands // 2, lambda: _step(session, data))
    began = time.perf_counter()
    sent = [session.forward(data) for _ in range(num_commands)]
    for pending in sent:
        pending.result(600)
    together_s = time.perf_counter() - began
    time.sleep(4)
    assert client.call("GET", f"/runs/{session.id}")["phase"] == "waiting_for_commands"
    back = _times(1, lambda: session.forward(data))["p50"]
    session.close()
    return {
        "forward": forwards,
        "forward_backward": gradients,
        "forward_backward_and_step": steps,
        "forwards_a_second_without_waiting": round(num_commands / together_s, 1),
        "back_from_idle": back,
    }


class _S3:
    """An S3 server in this process that counts requests, and delays each."""

    def __init__(self, pause_s: float) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self.count = 0
        app = DomainDispatcherApplication(create_backend_app)

        def counted(environ: dict[str, Any], start_response: Any) -> Any:
            self.count += 1
            time.sleep(pause_s)
            return app(environ, start_response)

        self.server = make_server("127.0.0.1", 0, counted, threaded=True)
        self.settings = {
            "LONGSHORE_STORE_URI": "s3://longshore/stack",
            "LONGSHORE_S3__ENDPOINT_URL": f"http://127.0.0.1:{self.server.port}",
            **{"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"},
        }

    def a_second(self, seconds: float = 20.0) -> float:
        before, began = self.count, time.perf_counter()
        time.sleep(seconds)
        return round((self.count - before) / (time.perf_counter() - began), 2)


@contextmanager
def _s3(pause_s: float) -> Iterator[_S3]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    s3 = _S3(pause_s)
    threading.Thread(target=s3.server.serve_forever, daemon=True).start()
    httpx.put(f"{s3.settings['LONGSHORE_S3__ENDPOINT_URL']}/longshore").raise_for_status()
    try:
        yield s3
    finally:
        s3.server.shutdown()


def _requests(client: Client, model: Path, s3: _S3, num_commands: int) -> dict[str, object]:
    without = s3.a_second()
    session = client.sessions.open(SessionRun(model=str(model), trainable=Lora(rank=8), max_tokens=TOKENS, idle_s=600))
    data = [Datum(tokens=tuple(range(3, 3 + TOKENS)))]
    for _ in range(_WARM_UP):
        session.forward(data).result(600)
    rests = s3.a_second()
    # It waits for the one before it.
    early = client.sessions.send(session.id, _WARM_UP + 2, Forward(data=tuple(data)))
    waits = s3.a_second()
    client.sessions.send(session.id, _WARM_UP + 1, Forward(data=tuple(data))).result(600)
    early.result(600)
    session = client.sessions.attach(session.id)
    before = s3.count
    forwards = _times(num_commands, lambda: session.forward(data))
    a_command = round((s3.count - before) / num_commands, 2)
    session.close()
    return {
        "store": "S3",
        "requests_a_second": {"no_session": without, "a_session_that_rests": rests, "one_whose_client_waits": waits},
        "requests_a_command": a_command,
        "forward": forwards,
    }


def _tinker(connection: Connection, model: Path, num_commands: int) -> dict[str, object]:
    """Measure calls of Tinker's SDK in a separate process."""
    root = Path(__file__).parents[1]
    told = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.tinker_client", f"{connection.api_url}/tinker", connection.api_key),
            *(str(model), str(TOKENS), str(num_commands)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / _SDK), str(root)])},
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    return {"client": "tinker 0.38.0"} | {name: _quantiles(times) for name, times in json.loads(told).items()}


def _step(session: Session, data: list[Datum]) -> Pending:
    session.forward_backward(data)
    return session.optim_step(learning_rate=1e-3)


def _times(how_often: int, send: Callable[[], Pending]) -> dict[str, float]:
    found = []
    for _ in range(how_often):
        began = time.perf_counter()
        send().result(600)
        found.append(1000 * (time.perf_counter() - began))
    return _quantiles(found)


def _quantiles(found: list[float]) -> dict[str, float]:
    found = sorted(found)
    return {
        "p50": round(statistics.median(found), 1),
        "p99": round(found[min(len(found) - 1, int(0.99 * len(found)))], 1),
        "worst": round(found[-1], 1),
    }


def _in_process(model: Path, num_commands: int) -> dict[str, float]:
    """The same forward on an engine of this process."""
    from longshore.training import Layout
    from megatron_worker.dispatch import Dispatcher
    from megatron_worker.engine import Outputs
    from megatron_worker.megatron.engine import MegatronEngine
    from megatron_worker.process.ranks import backend, start_group
    from megatron_worker.training.batches import Role, pack_data

    start_group(backend())
    dispatcher = Dispatcher(MegatronEngine(model, Layout(), "float32"))
    dispatcher.create_slot("one", Lora(rank=8), 0)
    sent = stored_form(Forward(data=(Datum(tokens=tuple(range(3, 3 + TOKENS))),)))
    found = []
    for number in range(_WARM_UP + num_commands):
        began = time.perf_counter()
        _, units = read_command(sent)
        assert units is not None
        packed = pack_data(units, TOKENS, share_prefixes=False)
        for _ in dispatcher.score([Role("one", packed.batches, range(1), Outputs(), packed.scores)]):
            pass
        if number >= _WARM_UP:
            found.append(1000 * (time.perf_counter() - began))
    return _quantiles(found)


if __name__ == "__main__":
    main()
