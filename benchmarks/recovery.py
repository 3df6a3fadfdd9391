"""How long a run is interrupted by a kill: seconds until it reports a new step.

    python -m benchmarks.recovery [--times 5] [--only gpu_host ...] [--out FILE.json]

Starts `longshore dev` with separate hosts in a temporary folder, and on it an SFT run, then a run that samples, of a
tiny model. Kills (SIGKILL) each kind of process while the run makes progress, the sampler and its host while they
sample. `everything` also kills the supervisor; `longshore dev --detach` starts it again, and that time counts. Polls
`GET /runs/<id>`. For every kill: seconds until the step shown is greater than the newest one on record at the kill.
`nothing` is the same without a kill: progress is reported at intervals of at least two seconds, and a step that samples
takes longer.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil

from benchmarks.control_plane import LONGSHORE, tiny_run
from benchmarks.machine import provenance, tell, until
from longshore.events import Step
from service.dev import Connection
from shared.child_environment import STACK_MARK
from shared.runs.events import read_run_events
from shared.storage.paths import HostPaths
from shared.storage.store import LocalStore

_until = partial(until, patience_s=180.0, every_s=0.05)
_STEADY_S = 3.0
PROMPTS = 16
LETTERS = "def grade(sample, item):\n    return sample['output_text'].count('e') / 8\n"


@dataclass
class Stack:
    """`longshore dev` in a folder, and the run that is watched."""

    root: Path
    run_id: str = ""

    def start(self) -> None:
        subprocess.run(
            [LONGSHORE, "dev", "--detach", "--open", "/", "--root", str(self.root)],
            check=True,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"LONGSHORE_SEPARATE_HOSTS": "true"},
        )

    def processes(self, *words: str) -> list[psutil.Process]:
        """Running processes of this stack whose command line contains all words."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                command = " ".join(process.cmdline())
                ours = f"{self.root}/" in command or process.environ().get(STACK_MARK) == str(self.root)
                if ours and process.status() != psutil.STATUS_ZOMBIE and all(word in command for word in words):
                    found.append(process)
        return found

    def ask(self, method: str, path: str, body: object = None) -> dict | None:
        """None while nobody answers."""
        connection = Connection.read(self.root)
        assert connection is not None
        headers = {"authorization": f"Bearer {connection.api_key}", "idempotency-key": uuid.uuid4().hex}
        try:
            url = f"{connection.api_url}/api/v1{path}"
            answer = httpx.request(method, url, headers=headers, json=body, timeout=30, trust_env=False)
        except httpx.TransportError:
            return None
        assert answer.status_code < 500 or answer.status_code == 503, answer.text
        assert answer.status_code == 503 or answer.is_success, answer.text
        return answer.json() if answer.is_success else None

    def submit(self, kind: str, body: dict) -> None:
        made = self.ask("POST", f"/runs/{kind}", body)
        assert made is not None
        self.run_id = made["run_id"]

    def shown(self) -> int:
        """The step in the run's view; -1 while the service does not answer."""
        view = self.ask("GET", f"/runs/{self.run_id}")
        if view is None:
            return -1
        assert view["state"] == "running", view
        return int(view["step"])


Victims = Callable[[Stack], list[psutil.Process]]


def _host(role: str) -> Victims:
    return lambda stack: stack.processes("service.host", role)


def _everything(stack: Stack) -> list[psutil.Process]:
    supervisor = Connection.read(stack.root)
    assert supervisor is not None and supervisor.pid is not None
    return [psutil.Process(supervisor.pid), *stack.processes()]


def _ranks(stack: Stack) -> list[psutil.Process]:
    return [p for p in stack.processes("megatron_worker", "--root") if "torch.distributed.run" not in p.cmdline()]


SFT_KINDS: dict[str, Victims] = {
    "nothing": lambda stack: [],
    "web_service": lambda stack: stack.processes("service.app"),
    "temporal": lambda stack: stack.processes("server", "start-dev"),
    "rank": lambda stack: _ranks(stack)[:1],
    "control_host": _host("control"),
    "gpu_host": _host("gpu"),
    "everything": _everything,
}
RL_KINDS: dict[str, Victims] = {
    "nothing (sampling)": lambda stack: [],
    "control_host (sampling)": _host("control"),
    "sampler": lambda stack: stack.processes("megatron_worker.sampler"),
    "sampler_host": _host("sampler"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="kills of each kind")
    parser.add_argument("--only", nargs="*", choices=[*SFT_KINDS, *RL_KINDS], help="these kinds")
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which is killed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, started(Path(folder) / "stack") as stack:
        told: dict[str, list[float]] = {}
        for submit, kinds in ((submit_sft, SFT_KINDS), (submit_rl, RL_KINDS)):
            wanted = {kind: kinds[kind] for kind in kinds if not options.only or kind in options.only}
            if wanted:
                submit(stack, Path(folder))
                told |= _measure(stack, wanted, options.times, chance)
                stack.ask("POST", f"/runs/{stack.run_id}/cancel")
    result = {
        "what": "seconds from a kill until a step is told that had not been done before it",
        "median": {kind: round(statistics.median(seconds), 1) for kind, seconds in told.items()},
        "seconds": {kind: [round(s, 1) for s in seconds] for kind, seconds in told.items()},
        **provenance(),
    }
    tell(result, options.out)


@contextmanager
def started(root: Path) -> Iterator[Stack]:
    os.environ.update(LONGSHORE_ROOT=str(root), LONGSHORE_CPU_THREADS="1")
    stack = Stack(root)
    stack.start()
    try:
        yield stack
    finally:
        subprocess.run([LONGSHORE, "dev", "--stop", "--root", str(root)], check=True)


def submit_sft(stack: Stack, folder: Path) -> None:
    run = tiny_run(folder).model_copy(update={"steps": 20_000, "checkpoint_every": 25})
    stack.submit("sft", run.model_dump(mode="json"))


def submit_rl(stack: Stack, folder: Path) -> None:
    prompts = folder / "prompts.jsonl"
    rows = ({"messages": [{"role": "user", "content": f"Name ship {n}."}]} for n in range(64))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tiny_run(folder).model
    rollouts = {
        "prompts": {"uri": f"file://{prompts}"},
        "grader": {"type": "python", "name": "letters", "source": LETTERS},
        "prompts_per_step": PROMPTS,
        "group_size": 8,
        "max_completion_tokens": 48,
        "steps": 1000,
    }
    stack.submit("rl", {"model": model, "loss": {"kind": "reinforce"}, "max_tokens": 96, "rollouts": rollouts})


def _measure(stack: Stack, kinds: dict[str, Victims], times: int, chance: random.Random) -> dict[str, list[float]]:
    told: dict[str, list[float]] = {kind: [] for kind in kinds}
    _until_ahead(stack, stack.shown())
    for _ in range(times):
        for kind, victims in kinds.items():
            told[kind].append(_kill(stack, kind, victims, chance))
            print(f"{kind}: {told[kind][-1]:.1f} s", file=sys.stderr, flush=True)
    return told


def _kill(stack: Stack, kind: str, victims: Victims, chance: random.Random) -> float:
    time.sleep(_STEADY_S + chance.uniform(0, 2))  # so that the supervisor starts it again without a longer pause
    _until_ahead(stack, stack.shown())
    if "sampl" in kind:
        _until(lambda: _is_sampling(stack), "it samples")
    done, killed = _newest_step(stack), victims(stack)
    assert killed or kind.startswith("nothing"), f"no {kind} to kill"
    began = time.monotonic()
    for process in killed:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    done = max(done, _newest_step(stack))  # done while we looked
    if kind == "everything":
        while left := stack.processes():  # processes that the supervisor has just started
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        stack.start()
    _until_ahead(stack, done)
    return time.monotonic() - began


def _until_ahead(stack: Stack, done: int) -> None:
    _until(lambda: stack.shown() > done, f"a step behind {done}")


def _newest_step(stack: Stack) -> int:
    """The newest step in the run's records if it samples; else the newest in the store and on the worker's disk."""
    store = stack.root / "store"
    steps = [int(record.stem) for record in (store / "runs" / stack.run_id / "steps").glob("*.json")]
    if not steps:
        found, _ = read_run_events(LocalStore(store), stack.run_id)
        steps = [item.event.step for item in found if isinstance(item.event, Step)]
        for log in HostPaths(stack.root).workers.glob(f"*/outputs/{stack.run_id}/*/*/log.jsonl"):
            with suppress(FileNotFoundError, ValueError):  # gone, or a line that is being written
                steps += [
                    e["step"] for e in map(json.loads, log.read_text().splitlines()[-50:]) if e["event"] == "step"
                ]
    return max(steps, default=0)


def _is_sampling(stack: Stack) -> bool:
    """Some prompts of a step have all their samples, and most do not yet."""
    return 0 < sum(1 for _ in (stack.root / "store" / "sampled").glob("*-parts/*.json")) < PROMPTS / 2


if __name__ == "__main__":
    main()
