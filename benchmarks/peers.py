"""Longshore and its peers side by side in one run: the same model, data, seed and threads, and the losses compared.

    python -m benchmarks.peers [--parts sft grpo session cold_start] [--models tiny real] [--rounds 3] [--threads N]
                               [--out FILE.json]

sft         a run of `longshore.local` against transformers + PEFT, packed, and TRL's SFTTrainer with packing. An
            optimizer step is one pass over all rows, so all sides train the same tokens in each step.
grpo        a run of `longshore.local` that samples, grades and trains, 8 answers a prompt, long prompts, against TRL's
            GRPOTrainer: whole steps, in seconds for 1,000 drawn tokens. Then TRL trains what Longshore drew in its
            first step, to compare loss and gradient norm.
session     the Tinker API of `longshore dev` against SkyRL's server with its JAX backend, both driven by Tinker's SDK
cold_start  from nothing to a first step, against torchrun + PEFT (benchmarks/cold_start.py)

    tiny   hidden 64, 2 layers, vocabulary 512     real   SmolLM2-135M-Instruct (examples/real_model.py)

Each peer has its own environment in `.venv/peers`, of pinned packages, made at the first call. Sides take turns:
in each round each is started once, and the next round begins with another. A side's figure is the time from the end of
its first step to the end of its last, by the clock and in CPU seconds of all its processes, which other work on
the machine disturbs less. `ratios` are the peer's figure over ours, of medians over the rounds; above 1 we are faster.
All in float32, without layers that are computed twice.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from activities.hosts.programs import SPIN_COUNT
from benchmarks.control_plane import stack
from benchmarks.machine import attempt, provenance, tell, until
from examples.real_model import make_real_model
from examples.tiny_model import make_tiny_model
from longshore.dataset_runs import DatasetSource, PromptsSource, SFTRun
from longshore.grading import PythonGrader
from longshore.local import train
from longshore.runs import RLRun, Rollouts
from longshore.training import Lora, Target

ROOT = Path(__file__).parents[1]
PLACE = ROOT / ".venv" / "peers"
PARTS = ("sft", "grpo", "session", "cold_start")
# What each peer's environment has: torch is the build that .venv has, where that one fits.
ENVIRONMENTS = {
    "trl": (None, ["transformers==5.23.0", "peft==0.21.2", "trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0"]),
    "skyrl": ("3.12", ["skyrl[tinker,jax]==0.4.0", "aiohttp==3.14.5"]),  # imported, and not among its dependencies
}
TARGETS: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LETTERS = "def grade(sample, item):\n    return sample['output_text'].count('e') / 8\n"
ALIKE = 1e-3  # the largest difference of losses of the same work
Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=("tiny", "real"), default=["tiny", "real"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="what it has of other parts and models stays")
    parser.add_argument("--ours", nargs=2, metavar=("PART", "WORK"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ours:
        print(json.dumps(_ours(given.ours[0], json.loads(Path(given.ours[1]).read_text()))))
        return
    known = json.loads(given.out.read_text())["parts"] if given.out and given.out.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        makers: dict[str, Callable[[], Path]] = {
            "tiny": lambda: make_tiny_model(
                folder / "tiny", [f"Crane {n} lifts crate {n * 7 % 50}." for n in range(50)]
            ),
            "real": make_real_model,
        }
        models = {each: makers[each]() for each in given.models}
        parts = {"sft": _sft, "grpo": _grpo, "session": _session, "cold_start": _cold_start}
        for part in given.parts:
            for model, path in models.items():
                scratch = folder / f"{part}-{model}"
                scratch.mkdir()
                measured = attempt(partial(parts[part], scratch, model, path, given))
                about = {"rounds": given.rounds, "threads": given.threads, **provenance()}
                known.setdefault(part, {})[model] = measured | about
                print(part, model, json.dumps(measured), file=sys.stderr, flush=True)
    tell({"benchmark": "peers", "parts": known}, given.out)


# --- Environments, and processes in them ---


def _python(peer: str) -> Path:
    """Return the Python of a peer's environment, after making it at its pinned versions."""
    version, packages = ENVIRONMENTS[peer]
    if version is None:
        import torch

        packages = [f"torch=={torch.__version__}", *packages]
    folder, python, wanted = PLACE / peer, PLACE / peer / "bin" / "python", "\n".join(packages)
    mark = folder / "installed"
    if not mark.exists() or mark.read_text() != wanted:
        uv = str(ROOT / ".venv" / "uv" / "bin" / "uv")
        links = [f"--find-links={each}" for each in os.environ.get("PIP_FIND_LINKS", "").split()]
        # Commands of pyenv on the path run only where they are chosen.
        of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        chosen = sys.executable if version is None else str(of_pyenv[-1]) if of_pyenv else version
        subprocess.run([uv, "venv", "--clear", "--python", chosen, str(folder)], check=True)
        subprocess.run([uv, "pip", "install", "--no-progress", *links, "--python", str(python), *packages], check=True)
        mark.write_text(wanted)
    return python


def _told_by(command: list[str], threads: int) -> Figures:
    """Run a side to its end. Returns the JSON of its last line."""
    environment = {**os.environ, **SPIN_COUNT, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, env=environment, cwd=ROOT, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[:4]}: {done.stderr[-1500:]}")
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def _rounds(sides: dict[str, list[str]], rounds: int, threads: int) -> dict[str, list[Figures]]:
    """Run all sides in each round, each round from another one on."""
    found: dict[str, list[Figures]] = {side: [] for side in sides}
    for number in range(rounds):
        names = list(sides)[number % len(sides) :] + list(sides)[: number % len(sides)]
        for side in names:
            found[side].append(_told_by(sides[side], threads))
    return found


def _a_step(told: Figures, clock: str) -> float:
    """Return the seconds of a step, without the first."""
    marks = [step[clock] for step in told["steps"]]
    return (marks[-1] - marks[0]) / (len(marks) - 1)


def _compared(found: dict[str, list[Figures]], per: dict[str, float] | None = None) -> Figures:
    """Medians of all sides, the peers' over ours, and the losses and norms of their steps. `per`: what divides them."""
    medians: dict[str, dict[str, float]] = {}
    for clock in ("wall_s", "cpu_s"):
        medians[clock] = {
            side: round(statistics.median(_a_step(told, clock) for told in each) / (per or {}).get(side, 1.0), 4)
            for side, each in found.items()
        }
    ratios = {
        clock: {side: round(s / own["longshore"], 2) for side, s in own.items() if side != "longshore"}
        for clock, own in medians.items()
    }
    steps = {
        side: [{name: round(step[name], 6) for name in ("loss", "grad_norm")} for step in each[0]["steps"]]
        for side, each in found.items()
    }
    return {"a_step": medians, "ratios": ratios, "steps": steps}


# --- Fine-tuning, and reinforcement learning ---


def _work(folder: Path, model: Path, given: argparse.Namespace, **own: Any) -> Path:
    """Write what all sides are given, with a fresh adapter that all begin with."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(r=16, lora_alpha=32, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    get_peft_model(base, config).save_pretrained(folder / "adapter")
    work: Figures = {"model": str(model), "adapter": str(folder / "adapter"), "scratch": str(folder / "scratch")}
    work |= {"threads": given.threads, "seed": 0, "rate": 1e-3, "drawn": None, **own}
    path = folder / "work.json"
    path.write_text(json.dumps(work))
    return path


def _sides(work: Path, *peers: str) -> dict[str, list[str]]:
    program = str(Path(__file__).with_name("peers_in_trl.py"))
    ours = {"longshore": [sys.executable, "-m", "benchmarks.peers", "--ours", peers[-1], str(work)]}
    return ours | {peer: [str(_python("trl")), "-P", program, peer, str(work)] for peer in peers}


def _sft(folder: Path, name: str, model: Path, given: argparse.Namespace) -> Figures:
    """Rows of lognormal lengths and random ids, packed into bins of 1,024 tokens."""
    num_rows, most = (48, 1024) if name == "tiny" else (4, 256)
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(5.6, 0.7, num_rows), 32, most).astype(int)
    rows = [generator.integers(3, 250, length).tolist() for length in lengths]
    steps = 6 if name == "tiny" else 2
    work = _work(folder, model, given, rows=rows, bin_tokens=1024, steps=steps)
    found = _rounds(_sides(work, "peft", "sft"), given.rounds, given.threads)
    told = _compared(found)
    first = [steps[0]["loss"] for steps in told["steps"].values()]
    return {"tokens_a_step": int(lengths.sum()), "is_alike": max(first) - min(first) <= ALIKE, **told}


def _grpo(folder: Path, name: str, model: Path, given: argparse.Namespace) -> Figures:
    """Long prompts, 8 answers each."""
    num, times, answer = (4, 40, 64) if name == "tiny" else (1, 24, 16)
    prompts = [" ".join(f"how many crates are on quay {n * 7 + m}?" for m in range(times)) for n in range(num)]
    work = _work(folder, model, given, prompts=prompts, group=8, answer_tokens=answer, steps=4 if name == "tiny" else 2)
    found = _rounds(_sides(work, "grpo"), given.rounds, given.threads)
    drawn = {
        side: statistics.mean(step["drawn_tokens"] for told in each for step in told["steps"][1:]) / 1000
        for side, each in found.items()
    }
    told = _compared(found, drawn)
    again = folder / "again.json"
    first = found["longshore"][0]
    again.write_text(json.dumps(json.loads(work.read_text()) | {"drawn": first["drawn"], "steps": 1}))
    theirs = _told_by([*_sides(again, "grpo")["grpo"]], given.threads)["steps"][0]
    ours = first["steps"][0]
    same = {each: {"longshore": round(ours[each], 6), "grpo": round(theirs[each], 6)} for each in ("loss", "grad_norm")}
    is_alike = all(abs(ours[each] - theirs[each]) <= ALIKE for each in same)
    return {"a_step_of": "1,000 drawn tokens", "same_answers": same, "is_alike": is_alike, **told}


def _ours(part: str, work: Figures) -> Figures:
    """Longshore's side: a run in this process and its children."""
    scratch = Path(tempfile.mkdtemp(dir=Path(work["scratch"]).parent))
    steps: list[Figures] = []

    def mark(step: int, metrics: dict[str, float]) -> None:
        steps.append({**metrics, "wall_s": time.perf_counter(), "cpu_s": _cpu_s()})
        if part == "grpo":
            steps[-1]["drawn_tokens"] = metrics["response_tokens"]

    same = {
        "model": Path(work["model"]).as_uri(),
        "trainable": Lora(rank=16, alpha=32, targets=TARGETS),
        "initial_adapter": Path(work["adapter"]).as_uri(),
        "learning_rate": work["rate"],
        "dtype": "float32",
        "seed": work["seed"],
        "schedule": "constant",
    }
    if part == "sft":
        rows = scratch / "rows.jsonl"
        rows.write_text("".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in work["rows"]))
        sizes = {"steps": work["steps"], "batch_size": len(work["rows"]), "max_tokens": work["bin_tokens"]}
        tuned = SFTRun(**same, dataset=DatasetSource(uri=rows.as_uri()), bin_tokens=work["bin_tokens"], **sizes)
        train(tuned, scratch / "out", mark, work["threads"])
        return {"steps": steps}
    prompts = scratch / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in work["prompts"]))
    rollouts = Rollouts(
        prompts=PromptsSource(uri=prompts.as_uri()),
        grader=PythonGrader(name="letters", source=LETTERS),
        prompts_per_step=len(work["prompts"]),
        group_size=work["group"],
        max_completion_tokens=work["answer_tokens"],
        steps=work["steps"],
    )
    # Both without the division by a group's deviation: TRL's is of the sample, ours of the population, as the paper's.
    dapo = {"algorithm": "dapo", "equal_rewards": "keep", "advantages": "group_mean"}
    run = RLRun(**same, **dapo, rollouts=rollouts, publish_every=1_000_000)
    train(run, scratch / "out", mark, work["threads"])
    return {"steps": steps, "drawn": _first_answers(scratch / "out" / "store")}


def _cpu_s() -> float:
    """CPU seconds of this process and its children, and of those that have ended."""
    own = psutil.Process()
    return float(sum(sum(each.cpu_times()[:4]) for each in (own, *own.children(recursive=True))))


def _first_answers(store: Path) -> list[Figures]:
    """Return what was drawn in the first step: each prompt's ids, and those of its answers with their logprobs."""
    groups = min(store.glob("grouped/*/groups/groups.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    found = []
    for line in groups.read_text().splitlines():
        answers, prompt = [], []
        for each in json.loads(line)["trajectories"]:
            begins = each["sampled"].index(True)
            prompt = each["token_ids"][:begins]
            answers.append({"ids": each["token_ids"][begins:], "logprobs": each["logprobs"][begins:]})
        found.append({"prompt": prompt, "answers": answers})
    return found


# --- Servers of Tinker's API, and cold starts ---


def _session(folder: Path, name: str, model: Path, given: argparse.Namespace) -> Figures:
    """Round trips of Tinker's SDK, 64 tokens each, on both servers at once; only one is asked at a time."""
    ours = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / ".venv" / "clients" / "tinker-38"), str(ROOT)])}
    theirs = {**os.environ, "PYTHONPATH": str(ROOT)}
    found: dict[str, list[Figures]] = {"longshore": [], "skyrl": []}
    settings = {"LONGSHORE_CPU_THREADS": str(given.threads)}
    with stack(folder / "stack", **settings) as connection, _skyrl(folder, model, given.threads) as url:
        client = ["-m", "benchmarks.tinker_client"]
        count = "50" if name == "tiny" else "10"
        sides = {
            "longshore": ([sys.executable, *client, f"{connection.api_url}/tinker", connection.api_key], ours),
            "skyrl": ([str(_python("skyrl")), *client, url, "any"], theirs),
        }
        for number in range(given.rounds):
            for side in sorted(sides, reverse=number % 2 == 1):
                command, environment = sides[side]
                done = subprocess.run(
                    [*command, str(model), "64", count],
                    env=environment,
                    cwd=ROOT,
                    check=True,
                    stdout=subprocess.PIPE,
                )
                found[side].append(json.loads(done.stdout.splitlines()[-1]))
    medians = {
        side: {kind: round(statistics.median(ms for told in each for ms in told[kind]), 1) for kind in each[0]}
        for side, each in found.items()
    }
    ratios = {kind: round(medians["skyrl"][kind] / ms, 2) for kind, ms in medians["longshore"].items()}
    return {"p50_ms": medians, "ratios": ratios}


@contextmanager
def _skyrl(folder: Path, model: Path, threads: int) -> Iterator[str]:
    """SkyRL's Tinker server on CPU. It starts its engine by the `uv run` that started itself."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    python, uv = _python("skyrl"), ROOT / ".venv" / "uv" / "bin"
    own = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "PATH": f"{uv}:{os.environ['PATH']}"}
    own |= {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "OMP_NUM_THREADS": "1"} if threads == 1 else {}
    command = [
        *("uv", "run", "--no-project", "--offline", "--python", str(python), "-m", "skyrl.tinker.api"),
        *("--base-model", str(model), "--backend", "jax", "--host", "127.0.0.1", "--port", str(port)),
        *("--checkpoints-base", str(folder / "checkpoints"), "--database-url", f"sqlite:///{folder}/skyrl.db"),
        *("--backend-config", json.dumps({"max_lora_adapters": 8, "max_lora_rank": 8})),
    ]
    with (folder / "skyrl.log").open("wb") as log:
        server = psutil.Popen(command, stdout=log, stderr=log, env={**os.environ, **own}, cwd=folder)
    try:

        def answers() -> bool:
            if not server.is_running() or server.status() == psutil.STATUS_ZOMBIE:
                raise RuntimeError((folder / "skyrl.log").read_text()[-1500:])
            with socket.socket() as tried:
                return tried.connect_ex(("127.0.0.1", port)) == 0

        until(answers, "SkyRL's server", 300.0, 0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        started = [server, *server.children(recursive=True)]
        for process in started:
            process.terminate()
        psutil.wait_procs(started, 20)


def _cold_start(folder: Path, name: str, _: Path, given: argparse.Namespace) -> Figures:
    """Totals of benchmarks/cold_start.py."""
    out = folder / "cold_start.json"
    own = ["--models", name, "--launchers", "local", "--times", str(given.rounds), "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.cold_start", *own]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    found = json.loads(out.read_text())["models"][name]
    totals = {"longshore": found["local"]["total"], "torchrun": found["torchrun"]["total"]}
    return {"total_s": totals, "ratios": {"torchrun": round(totals["torchrun"] / totals["longshore"], 2)}}


if __name__ == "__main__":
    main()
