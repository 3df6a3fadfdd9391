"""Traces and metrics of a run, and their cost.

    python -m benchmarks.observability trace --svg docs/images/rl_step_trace.svg
    python -m benchmarks.observability overhead [--pairs 6] [--steps 150] [--out FILE]
    python -m pip install --target LIBRARIES matplotlib
    PYTHONPATH=LIBRARIES python -m benchmarks.observability dashboard --png docs/images/dashboard.png

`dashboard` lets Debian's Prometheus scrape a stack while runs train, sample, fail and lose their workers, sends it each
query of the Grafana dashboard, and draws the panels; a query that is refused or finds nothing is an error. `trace` runs
one RL step on a warm stack and draws its trace, from the command to the optimizer step. `overhead` starts two stacks,
one with traces (to a receiver here) and metrics (read every 15 s), one with neither, and does the same SFT run on each
in turn. `overhead` in its JSON is the extra CPU time of service and hosts, as a share of theirs and the worker's
without telemetry. (The worker has no such code.) It also measures the code for a step's span and counts alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, get_args

import httpx

from benchmarks import dashboard
from benchmarks.control_plane import LONGSHORE, stack
from benchmarks.machine import provenance, tell, until
from benchmarks.spans import Receiver, of_run, picture, receiver
from benchmarks.stack_processes import processes, processor_s
from examples.tiny_model import make_tiny_model
from longshore import Client
from longshore.dataset_runs import DatasetSource, SFTRun
from longshore.training import Full, Lora
from longshore.views import PreviewRequest
from service.dev import Connection

WARM = {"LONGSHORE_WORKER_IDLE_S": "600"}
PORTS = 21_700
WINDOW = "15s"  # of rates: the picture has minutes, and Prometheus reads each second
# These intermediate spans only repeat their child's information.
HIDDEN = ("StartActivity:", "SignalWorkflow:", "HandleSignal:")
GRADER = {
    "type": "python",
    "name": "letters",
    "source": "def grade(sample, item):\n    return sample['output_text'].count('e') / 8\n",
}


# Figures of a run: CPU seconds of service and hosts, and of the worker; seconds until its end.
Of = Literal["hosts_s", "worker_s", "until_end_s"]
Cost = dict[Of, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    trace = parts.add_parser("trace")
    trace.add_argument("--svg", type=Path, required=True)
    overhead = parts.add_parser("overhead")
    overhead.add_argument("--pairs", type=int, default=6)
    overhead.add_argument("--steps", type=int, default=150)
    overhead.add_argument("--out", type=Path)
    drawn = parts.add_parser("dashboard")
    drawn.add_argument("--png", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.part == "trace":
            given.svg.write_text(draw_step(Path(folder)))
        elif given.part == "dashboard":
            draw_dashboard(Path(folder), given.png)
        else:
            tell(measure(Path(folder), given.pairs, given.steps) | provenance(), given.out)


def draw_step(folder: Path) -> str:
    """Return the picture of the second of two runs of one step each: worker and sampler are warm then."""
    command = [*_rl_command(folder, steps=1), "--wait"]
    with receiver() as received, stack(folder / "stack", **WARM, **_traced(received)):
        environment = {**os.environ, "LONGSHORE_ROOT": str(folder / "stack"), **_traced(received)}
        for seed in ("1", "2"):
            done = subprocess.run([*command, "--seed", seed], env=environment, check=True, stdout=subprocess.PIPE)
        run_id = json.loads(done.stdout)["run_id"]
        time.sleep(3)  # the lease's span is sent once the host has returned the lease
        spans = [span for span in of_run(received.spans(), run_id) if not span.name.startswith("GET ")]
    return picture(spans, "An RL run of one step: 64 answers of a tiny model, on warm processes of one machine", HIDDEN)


def _rl_command(folder: Path, steps: int) -> list[str]:
    """Return the command that submits an RL run of 64 answers a step."""
    model, prompts = (
        make_tiny_model(folder / "model", ["name a ship of the harbour. the evening tide."] * 8),
        folder / "p",
    )
    rows = ({"messages": [{"role": "user", "content": f"Name ship {n}."}]} for n in range(8))
    prompts.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(LONGSHORE, "submit", "rl", "--json", "--model", str(model), "--prompts", str(prompts.with_suffix(".jsonl"))),
        *("--grader", json.dumps(GRADER), "--steps", str(steps), "--prompts-per-step", "8", "--group-size", "8"),
        *("--max-completion-tokens", "64", "--loss", "reinforce", "--lora-rank", "4", "--max-tokens", "128"),
    ]


def draw_dashboard(folder: Path, picture_file: Path) -> None:
    """Draw the dashboard of some minutes of work. Raises Refused, after drawing: a query finds nothing."""
    ports = {instance: PORTS + place for place, instance in enumerate(("web", "host"))}
    settings = {"LONGSHORE_METRICS__PORT": str(PORTS), "LONGSHORE_WORKER_IDLE_S": "10"}
    command, drawn, refused = _rl_command(folder, steps=8), [], []
    with (
        stack(folder / "stack", **settings) as connection,
        dashboard.prometheus(folder / "prometheus", ports) as asked,
    ):
        begin = time.time()
        marks = _work(folder, connection, command)
        end = time.time()
        for panel in dashboard.panels(WINDOW):
            try:
                drawn.append((panel, dashboard.lines_of(panel, asked, begin, end)))
            except dashboard.Refused as error:
                refused.append(str(error))
    title = f"Longshore's dashboard, drawn from Prometheus' answers to its queries; rates over {WINDOW}"
    dashboard.draw(drawn, title, {what: second - begin for what, second in marks.items()}, picture_file)
    if refused:
        raise dashboard.Refused("; ".join(refused))


def _work(folder: Path, connection: Connection, command: list[str]) -> dict[str, float]:
    """Have runs train and sample, lose their workers, fail; have requests refused. Returns when something was done."""
    root, client, marks = folder / "stack", _client(connection), {"an RL run and two SFT runs": time.time()}
    data = folder / "rows.jsonl"
    rows = [{"messages": [{"role": role, "content": "the tide " * 30} for role in ("user", "assistant")]}] * 64
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"steps": 150, "batch_size": 16, "max_tokens": 256, "checkpoint_every": 50}
    model, source = (folder / "model").as_uri(), DatasetSource(uri=data.as_uri())
    long, full = (SFTRun(model=model, dataset=source, trainable=trained, **sizes) for trained in (Lora(rank=4), Full()))
    environment = {**os.environ, "LONGSHORE_ROOT": str(root)}
    ids = [client.runs.submit(long, "adapters").run_id, client.runs.submit(full, "every weight").run_id]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    ids.append(json.loads(done.stdout)["run_id"])
    look = PreviewRequest(source=source, model_uri=model)
    gone = DatasetSource(uri=(folder / "not there.jsonl").as_uri())
    failing = long.model_copy(update={"dataset": gone})
    ids.append(client.runs.submit(failing, "no data").run_id)
    with httpx.Client(base_url=connection.api_url, timeout=60) as stranger:
        until(lambda: client.runs.get(ids[0]).phase == "training", "training", 900, 0.5)
        time.sleep(10)
        marks["workers are killed; requests of what is not there, and without a key"] = time.time()
        for role, process in processes(root):
            if role == "worker":
                process.kill()
        for path in ("/api/v1/runs", "/api/v1/nothing"):
            stranger.get(path)
        stranger.headers["authorization"] = f"Bearer {connection.api_key}"
        stranger.get("/api/v1/runs/none")
        until(lambda: all(client.runs.get(each).state != "running" for each in ids), "the runs' ends", 1800, 1.0)
        marks["Temporal is held for 20 s"] = time.time()
        (temporal,) = (process for role, process in processes(root) if role == "temporal")
        temporal.suspend()
        try:
            held_until = time.monotonic() + 20
            while time.monotonic() < held_until:
                stranger.post("/api/v1/preview", json=look.model_dump(mode="json"))
        finally:
            temporal.resume()
    time.sleep(20)
    return marks


def measure(folder: Path, pairs: int, steps: int) -> dict[str, object]:
    """Return processor seconds and seconds of runs, with and without."""
    model = make_tiny_model(folder / "model", ["how many crates are on the quay? seven crates."] * 8)
    data = folder / "data.jsonl"
    rows = (
        {"messages": [{"role": "user", "content": f"quay {n}?"}, {"role": "assistant", "content": "crates " * 40}]}
        for n in range(64)
    )
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = SFTRun(
        model=model.as_uri(),
        dataset=DatasetSource(uri=data.as_uri()),
        trainable=Lora(rank=4),
        steps=steps,
        batch_size=32,
        max_tokens=256,
    )
    found: dict[str, list[Cost]] = {"on": [], "off": []}
    with ExitStack() as open_stacks:
        received = open_stacks.enter_context(receiver())
        on = {**_traced(received), "LONGSHORE_METRICS__PORT": str(PORTS)}
        roots = {kind: folder / kind for kind in found}
        clients = {
            kind: _client(open_stacks.enter_context(stack(roots[kind], **WARM, **(on if kind == "on" else {}))))
            for kind in found
        }
        open_stacks.enter_context(_scraping())
        for pair in range(pairs + 1):  # the first warms both up
            for kind in ("on", "off") if pair % 2 else ("off", "on"):
                cost = _of_run(roots[kind], clients[kind], run.model_copy(update={"seed": pair}))
                found[kind] += [cost] if pair else []
        num_spans = len(received.spans())
    mean = {
        kind: {of: statistics.mean(cost[of] for cost in costs) for of in get_args(Of)} for kind, costs in found.items()
    }
    more = [on["hosts_s"] - off["hosts_s"] for on, off in zip(found["on"], found["off"], strict=True)]
    whole = mean["off"]["hosts_s"] + mean["off"]["worker_s"]
    return {
        "what": "traces and metrics on, against off: processor seconds of our processes for an SFT run",
        "steps": steps,
        "mean": {kind: {of: round(value, 3) for of, value in costs.items()} for kind, costs in mean.items()},
        "runs": found,
        "more_processor_s_of_service_and_hosts": {
            "median": round(statistics.median(more), 3),
            "pairs": [round(s, 3) for s in more],
        },
        "overhead": round(statistics.median(more) / whole, 4),
        "spans": num_spans,
        **direct_costs(),
    }


def direct_costs() -> dict[str, float]:
    """Return the cost of the telemetry code alone, in CPU microseconds, including encoding and sending spans."""
    from opentelemetry import trace

    from activities.telemetry import JobSeen
    from longshore.events import Step
    from longshore.fields import Fence
    from service import telemetry

    class Plan:
        run_id, job_id = "sft-0", "000001"

    with receiver() as received:
        os.environ |= _traced(received)
        telemetry.start_tracing("benchmark")
        seen, number = JobSeen(Plan(), Fence(epoch=1, attempt=1), time.time()), 20_000  # type: ignore[arg-type]
        metrics = {"loss": 1.0, "tokens": 4096.0, "num_bins": 2.0, "step_s": 0.5}
        events = [Step(seq=n, time=time.time(), step=n, metrics=metrics) for n in range(1, number + 1)]

        def steps() -> None:
            for event in events:
                seen.take(event)
                if event.step % 400 == 0:
                    trace.get_tracer_provider().force_flush()  # type: ignore[attr-defined]

        return {"microseconds_a_step": round(_cpu_us(steps) / number, 1)}


def _cpu_us(work: Callable[[], None]) -> float:
    begin = time.process_time()
    work()
    return (time.process_time() - begin) * 1e6


def _of_run(root: Path, client: Client, run: SFTRun) -> Cost:
    before, begin = processor_s(root), time.monotonic()
    run_id = client.runs.submit(run, f"run-{run.seed}").run_id
    while (view := client.runs.get(run_id)).state == "running":
        time.sleep(0.2)
    assert view.state == "succeeded", view.problem
    seconds, after = time.monotonic() - begin, processor_s(root)
    used = {role: after[role] - before.get(role, 0.0) for role in after}
    hosts = sum(used[role] for role in used if role == "service" or role.endswith("host"))
    return {"hosts_s": round(hosts, 3), "worker_s": round(used["worker"], 3), "until_end_s": round(seconds, 2)}


def _client(connection: Connection) -> Client:
    return Client(connection.api_url, connection.api_key)


def _traced(received: Receiver) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint}


@contextmanager
def _scraping() -> Iterator[None]:
    """Read the metrics of the service and the host every 15 s, as Prometheus does."""
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(15.0):
            for place in range(2):
                urllib.request.urlopen(f"http://127.0.0.1:{PORTS + place}/metrics").read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    main()
