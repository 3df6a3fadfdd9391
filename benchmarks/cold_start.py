"""From "a run waits and no host is up" to its first optimizer step, by phase, on local hosts and as jobs of Slurm.

    python -m benchmarks.cold_start [--models tiny real big] [--launchers local again slurm] [--times 3]
        [--rclone PROGRAM] [--vllm PROGRAM] [--out FILE.json]

Starts Temporal, the web service, a control host and a launcher (`service.launching`) without hosts; submits an SFT run
of one step, and takes the phases from the spans of its trace (docs/observability.md). Each host has a separate root, so
that it has no file of the model; with `again` a second host starts in the root of the first, as after a kill: it has
the files, and its machine has passed a check within the hour. With `--rclone` (1.68 or newer) `rclone serve s3` serves
the models; else they are in a folder of this machine, and not fetched. For comparison: the time of torchrun,
transformers and PEFT to a first step on the same rows, and with `--vllm` the time of `vllm serve` to a first answer.

    tiny   0.5 MB, random     real   SmolLM2-135M-Instruct (examples/real_model.py), 0.27 GB     big   1.3 GB, random
"""

import argparse
import hashlib
import json
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import psutil

from activities.hosts.programs import SPIN_COUNT
from benchmarks import slurm_cluster
from benchmarks.machine import provenance, tell, until
from benchmarks.spans import Receiver, Span, of_run, receiver
from examples.real_model import Unreachable, make_real_model
from examples.tiny_model import make_tiny_model
from longshore import Client
from longshore.dataset_runs import DatasetSource, SFTRun
from longshore.training import Lora
from service.dev import QUEUE_OPTIONS, temporal_binary

LauncherName = Literal["local", "again", "slurm"]
ROOT = Path(__file__).parents[1]
CORPUS = ["how many crates are on the quay? seven crates."] * 8
ROWS = [
    {"messages": [{"role": "user", "content": f"quay {n}?"}, {"role": "assistant", "content": f"{n} crates"}]}
    for n in range(4)
]
# Seconds on two idle cores, of any model; and those that each GB of weights may take besides.
TARGETS = {
    "launcher": 4.0,
    "host: imports": 2.5,
    "host: connect": 0.7,
    "host: asks for leases": 0.5,
    "start worker": 2.0,
    "to the job": 0.5,
    "claim": 0.2,
    "stage inputs": 0.5,
    "build engine": 0.7,
    "read weights": 0.1,
    "make slot": 0.2,
    "first pass": 1.0,
}
A_GB = {"stage inputs": 4.0, "build engine": 0.5, "read weights": 1.0, "make slot": 0.5, "first pass": 4.0}
_until = partial(until, patience_s=600.0, every_s=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=("tiny", "real", "big"), default=["tiny", "real", "big"])
    parser.add_argument("--launchers", nargs="*", choices=get_args(LauncherName), default=["local", "slurm"])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--rclone", help="serves S3")
    parser.add_argument("--vllm", help="of an environment of its own (requirements/vllm.sh)")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    skipped: dict[str, str] = {}
    if "slurm" in given.launchers and (reason := slurm_cluster.missing()):
        given.launchers.remove("slurm")
        skipped["slurm"] = reason
    if given.vllm is None:
        skipped["vllm"] = "--vllm names none"
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        models = _models(folder / "models", given.models, skipped)
        place = _place(stack, folder / "models", given.rclone)
        measured = _measured(stack, folder, models, place, given.launchers, given.times)
        for model, path in models.items():
            measured[model]["torchrun"] = _summed(_plain(place, path, folder) for _ in range(given.times))
            if given.vllm:
                measured[model]["vllm"] = {"total": round(_vllm(given.vllm, path), 2)}
    _print(measured)
    told = {"what": "seconds from a lease that waits, with no host up, to the first optimizer step: medians"}
    tell(told | {"times": given.times, "models": measured, "skipped": skipped} | provenance(), given.out)


def _models(folder: Path, wanted: Sequence[str], skipped: dict[str, str]) -> dict[str, Path]:
    made: dict[str, Path] = {}
    folder.mkdir()
    if "tiny" in wanted:
        made["tiny"] = make_tiny_model(folder / "tiny", CORPUS)
    if "real" in wanted:
        try:
            made["real"] = shutil.copytree(make_real_model(), folder / "real")
        except Unreachable as error:
            skipped["real"] = str(error)
    if "big" in wanted:
        made["big"] = sized_model(folder / "big", 1.3)
    return made


def sized_model(folder: Path, gigabytes: float) -> Path:
    """Make a model with about `gigabytes` of random weights, in float32."""
    layers = max(1, round(gigabytes / 0.11))
    return make_tiny_model(
        folder, CORPUS, hidden_size=1536, num_layers=layers, num_heads=12, num_kv_heads=4, head_dim=128
    )


@dataclass(frozen=True)
class Place:
    """Where models are stored. `settings`: what processes need to read them."""

    root: str
    settings: dict[str, str] = field(default_factory=dict)
    endpoint: str | None = None

    def uri(self, model: Path) -> str:
        return f"{self.root}/{model.name}"


def _place(stack: ExitStack, models: Path, rclone: str | None) -> Place:
    """Serve the folders of models as a bucket of S3, or name them as they are."""
    if rclone is None:
        return Place(models.as_uri(), {"LONGSHORE_DOWNLOAD__FILE_ROOTS": json.dumps([str(models)])})
    return s3_of(stack, models, rclone)


def s3_of(stack: ExitStack, models: Path, rclone: str, *options: str) -> Place:
    """Serve the folders of models as a bucket of S3, until the stack is closed."""
    port = slurm_cluster.free_port()
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    command = [
        rclone,
        "serve",
        "s3",
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        "key,secret",
        "--copy-links",
        *("--etag-hash", ""),  # else it reads the whole file for each range
        *options,
    ]
    stack.enter_context(_running([*command, str(models.parent)], {}, models.parent / "rclone.log"))
    _until(lambda: _listens(port), "rclone")
    endpoint = f"http://127.0.0.1:{port}"
    return Place(f"s3://{models.name}", {**keys, "LONGSHORE_S3__ENDPOINT_URL": endpoint}, endpoint)


def _measured(
    stack: ExitStack,
    folder: Path,
    models: dict[str, Path],
    place: Place,
    launchers: Sequence[LauncherName],
    times: int,
) -> dict[str, dict[str, dict[str, float]]]:
    received = stack.enter_context(receiver())
    control, client = _control_plane(stack, folder, place, received)
    slurm = stack.enter_context(slurm_cluster.cluster(folder / "slurm")) if "slurm" in launchers else {}
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    measured: dict[str, dict[str, dict[str, float]]] = {}
    for model, path in models.items():
        measured[model] = {"GB": {"weights": round(sum(p.stat().st_size for p in path.glob("*.safetensors")) / 1e9, 2)}}
        for launcher in launchers:
            found = []
            for number in range(times):
                run = SFTRun(
                    model=place.uri(path),
                    dataset=DatasetSource(uri=data.as_uri()),
                    trainable=Lora(rank=4),
                    steps=1,
                    batch_size=len(ROWS),
                    max_tokens=128,
                    dtype="float32",
                    seed=secrets.randbelow(1 << 30),
                )
                name = f"{model}-{launcher}-{number}"
                root = folder / (f"{model}-local-{number}" if launcher == "again" else name)
                with _launcher(launcher, root, control | slurm):
                    run_id = client.runs.submit(run, name).run_id
                    _until(lambda run_id=run_id: client.runs.get(run_id).state != "running", "the run's end")  # type: ignore[misc]
                    view = client.runs.get(run_id)
                    assert view.state == "succeeded", view.problem
                found.append(_phases(of_run(received.spans(), run_id)))
                print(name, {each: round(s, 2) for each, s in found[-1].items()}, file=sys.stderr, flush=True)
            measured[model][launcher] = _summed(found)
    return measured


def _control_plane(stack: ExitStack, folder: Path, place: Place, received: Receiver) -> tuple[dict[str, str], Client]:
    """Start all but GPU hosts. Returns the environment of hosts, and a client."""
    temporal, web, key = slurm_cluster.free_port(), slurm_cluster.free_port(), f"ls-{secrets.token_hex(24)}"
    environment = place.settings | {
        "OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "LONGSHORE_ROOT": str(folder / "control"),
        "LONGSHORE_STORE_URI": (folder / "store").as_uri(),
        "LONGSHORE_TEMPORAL_ADDRESS": f"127.0.0.1:{temporal}",
        "LONGSHORE_SEAL_KEY": secrets.token_hex(32),
        "LONGSHORE_API_KEY_SHA256": hashlib.sha256(key.encode()).hexdigest(),
        "LONGSHORE_WANDB_MODE": "disabled",
        "LONGSHORE_DOWNLOAD__FILE_ROOTS": json.dumps([str(folder)]),
        "PYTHONPATH": str(ROOT),
    }
    server = [temporal_binary(), "server", "start-dev", "--ip", "127.0.0.1", "--port", str(temporal), "--headless"]
    python = [sys.executable, "-P", "-m"]
    for name, command in {
        "temporal": [*server, "--log-level", "warn", *QUEUE_OPTIONS],
        "web": [*python, "service.app", "--port", str(web)],
        "control": [*python, "service.host", "--role", "control"],
    }.items():
        if name == "web":
            _until(lambda: _listens(temporal), "Temporal")
        stack.enter_context(_running(command, environment, folder / f"{name}.log"))
    _until(lambda: _is_ready(web), "the web service")
    return environment, Client(f"http://127.0.0.1:{web}", key)


@contextmanager
def _launcher(kind: LauncherName, root: Path, environment: dict[str, str]) -> Iterator[None]:
    """Start hosts while leases wait, with roots of their own. All have ended when the block has."""
    root.mkdir(exist_ok=kind == "again")
    own = environment | {"LONGSHORE_ROOT": str(root), "PYTHON": sys.executable}
    command = [sys.executable, "-P", "-m", "service.launching", "--most", "1"]
    if kind == "slurm":
        options = f"--gres=none --mem=0 --cpus-per-task={os.cpu_count()} --output={root}/host.log"
        script = ROOT / "infra" / "slurm" / "host.sbatch"
        command += ["--slurm", str(script), "--sbatch-options", options]
    with _running(command, own, root / "launcher.log") as launcher:
        _until(lambda: "service.launching" in " ".join(launcher.cmdline()), "the launcher")
        time.sleep(6.0 + secrets.randbelow(5000) / 1000)  # it looks, at a moment that has nothing to do with the run's
        yield
        hosts = launcher.children()
        for host in hosts:
            host.terminate()
        psutil.wait_procs(hosts, 60)
    if kind == "slurm":
        told = {**os.environ, **environment}
        subprocess.run(["scancel", "--batch", "--signal=TERM", "--me"], env=told, check=True)
        _until(
            lambda: not subprocess.run(["squeue", "--noheader"], env=told, capture_output=True, check=True).stdout,
            "the end of jobs",
        )


def _phases(spans: Sequence[Span]) -> dict[str, float]:
    """Return the seconds of each phase; they follow each other, so that they add up to the whole."""

    def first(name: str) -> Span:
        return next(span for span in spans if span.name == name)

    job, step = first("job"), first("optimizer step")
    told = [first(name) for name in TARGETS if any(span.name == name for span in spans)]
    waited, worker, staged = first("StartActivity:lease").begin, first("start worker"), first("stage inputs")
    found = (
        dict.fromkeys(TARGETS, 0.0)
        | {"launcher": told[0].begin - waited}
        | {span.name: span.end - span.begin for span in told}
    )
    found |= {"to the job": job.begin - worker.end, "claim": staged.begin - job.begin}
    found["first pass"] = step.end - step.begin
    return {name: found[name] for name in TARGETS} | {"total": step.end - waited}


def _summed(found: "Iterator[dict[str, float]] | Sequence[dict[str, float]]") -> dict[str, float]:
    """Return the median of each phase."""
    each = list(found)
    return {name: round(statistics.median(one[name] for one in each), 2) for name in each[0]}


def _plain(place: Place, model: Path, folder: Path) -> dict[str, float]:
    command = [str(Path(sys.executable).parent / "torchrun"), "--local-addr", "127.0.0.1", "--nproc_per_node", "1"]
    own = [
        "-m",
        "benchmarks.plain_peft",
        place.uri(model) if place.endpoint else str(model),
        str(folder / "data.jsonl"),
    ]
    since, endpoint = time.time(), ["--endpoint", place.endpoint] if place.endpoint else []
    environment = {**os.environ, **place.settings, "OMP_NUM_THREADS": str(os.cpu_count()), **SPIN_COUNT}
    done = subprocess.run(
        [*command, *own, str(since), *endpoint], stdout=subprocess.PIPE, check=True, env=environment, cwd=ROOT
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found | {"total": sum(found.values())}


def _vllm(program: str, model: Path) -> float:
    """Return the seconds until `vllm serve` has answered once, from a folder of this machine."""
    port, began = slurm_cluster.free_port(), time.time()
    options = ["--port", str(port), "--max-model-len", "128", "--dtype", "float32", "--enforce-eager"]
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({"model": str(model), "prompt": "quay", "max_tokens": 1}).encode(),
        {"content-type": "application/json"},
    )
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with _running([program, "serve", str(model), *options], settings, model.parent / "vllm.log"):
        _until(lambda: _answers(asked), "vLLM")
        return time.time() - began


def _print(measured: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print a table for each model: phases with their targets, and the rivals' totals."""
    for model, found in measured.items():
        size = found["GB"]["weights"]
        print(f"\n{model}, {size:g} GB", *(f"{name}: {found[name]}" for name in ("torchrun", "vllm") if name in found))
        kinds = [name for name in ("local", "slurm") if name in found]
        print(f"{'':24}{'target':>8}" + "".join(f"{name:>8}" for name in kinds))
        for name, least in TARGETS.items():
            target = least + size * A_GB.get(name, 0.0)
            print(f"{name:24}{target:8.1f}" + "".join(f"{found[kind][name]:8.2f}" for kind in kinds))
        print(f"{'total':32}" + "".join(f"{found[kind]['total']:8.2f}" for kind in kinds))


@contextmanager
def _running(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[psutil.Popen]:
    with log.open("ab") as output:
        process = psutil.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def _is_ready(port: int) -> bool:
    return _answers(urllib.request.Request(f"http://127.0.0.1:{port}/readyz"))


def _answers(asked: urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    main()
