"""A worker that obeys docs/job_protocol.md and trains nothing: one process, no torch, deterministic checkpoints.

A step hashes the state of the step before, so a run that went on from the wrong checkpoint ends in other bytes. Seeds
of a job choose its mishaps: see `SEEDS`.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from longshore.events import Cancelled, Evaluated, Failed, Offloaded, Probed, Saved, Started, Step, Succeeded
from shared.jobs.job import Job, LeaseMark, WorkerRecord
from shared.settings import S3Settings
from shared.storage.artifacts import seal, stage
from shared.storage.files import write_atomically
from shared.storage.paths import WorkerPaths

SEEDS = {
    **{"invalid_input": 901, "dies": 902, "deaf": 903, "error": 904, "dies_saved": 905, "crowded": 906},
    "flat": 907,
}


def adapter_bytes(seed: int, step: int) -> bytes:
    """The weights after a step, as every undisturbed run has them."""
    state = str(seed)
    for number in range(1, step + 1):
        state = _next(state, number)
    return _weights(state)


def _next(state: str, step: int, data: str = "") -> str:
    """`data`: what the step is trained on, where a run's steps have different data."""
    return hashlib.sha256(f"{state}/{step}{data}".encode()).hexdigest()


def _weights(state: str) -> bytes:
    return f"weights {state}\n".encode() * 100


def probe_logprobs(state: str, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """Numbers that say which weights, and which tokens, they are of."""
    return tuple(-1.0 - int(_next(state, token)[:4], 16) / 2**16 for token in token_ids[1:])


class StandIn:
    """The resident loop and the one job in hand."""

    def __init__(self, root: Path, step_s: float) -> None:
        self.paths = WorkerPaths(root)
        self.step_s = step_s
        self.record = WorkerRecord.model_validate_json(self.paths.record.read_bytes())
        self.seq = 0
        self.holds_device = False

    def serve(self) -> None:
        write_atomically(self.paths.ready, b"")
        while not self.paths.stop.exists() and self._host_lives():
            for path in sorted(self.paths.jobs.glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
                self.do(path)
            if self.holds_device and not any(self.paths.leases.glob("*.json")):
                self.holds_device = False
                write_atomically(self.paths.offloaded, b"0")
            time.sleep(0.01)

    def _host_lives(self) -> bool:
        try:
            started_at = psutil.Process(self.record.host_pid).create_time()
        except psutil.NoSuchProcess:
            return False
        return abs(started_at - self.record.host_started_at) < 1.0

    def do(self, path: Path) -> None:
        self.paths.claimed.mkdir(exist_ok=True)
        claimed = self.paths.claimed / path.name
        path.rename(claimed)
        job = Job.model_validate_json(claimed.read_bytes())
        self.seq = 0
        Path(job.scratch_dir).mkdir(parents=True, exist_ok=True)
        Path(job.log_path).parent.mkdir(parents=True, exist_ok=True)
        terminal = self._train(job)
        self._say(job, Offloaded, device_bytes_before=0, device_bytes_after=0, host_bytes=0, duration_s=0.0)
        shutil.rmtree(job.scratch_dir)
        self.paths.archive.mkdir(exist_ok=True)
        claimed.rename(self.paths.archive / path.name)
        kind, fields = terminal
        self.holds_device = job.plan.after == "keep"
        self._say(job, kind, device="held" if self.holds_device else "released", **fields)

    def _train(self, job: Job) -> tuple[type, dict]:
        plan, seed = job.plan, job.plan.seed
        lease = LeaseMark.model_validate_json(self.paths.lease(plan.run_id).read_bytes())
        if job.fence.is_older_than(lease.fence):
            return Failed, {"step": 0, "kind": "stale_fence", "message": f"{job.fence.label} is older than the lease"}
        if seed == SEEDS["crowded"] and job.fence.epoch == 1:
            return Failed, {"step": 0, "kind": "crowded", "message": "a slot of rank 16 takes 1,234 bytes on a rank"}
        step, state = self._start(job)
        last_step = plan.first_step + plan.num_steps
        data = "" if plan.loss.kind == "cross_entropy" else f"/{plan.data.units.sha256}/{plan.data.plan.sha256}"
        self._say(
            job,
            Started,
            run_id=plan.run_id,
            job_id=plan.job_id,
            fence=job.fence,
            first_step=step,
            num_steps=last_step,
            device="cpu",
            world_size=1,
        )
        if seed == SEEDS["invalid_input"]:
            return Failed, {"step": 0, "kind": "invalid_input", "message": "layout.tp: tp=3 does not divide 4 heads"}
        if seed == SEEDS["error"]:
            return Failed, {"step": 0, "kind": "error", "message": "RuntimeError: the stand-in cannot"}
        if plan.evaluation.data is not None and step == 0:
            self._say(job, Evaluated, step=0, metrics={"loss": 3.5})
        saved_step = step
        while step < last_step:
            if self.paths.cancel(plan.run_id, plan.job_id, job.fence).exists() and seed != SEEDS["deaf"]:
                if saved_step < step:
                    self._save(job, step, state)
                return Cancelled, {"step": step}
            time.sleep(self.step_s)
            step += 1
            state = _next(state, step, data)
            told = {"loss": 1.0 / step, "step_time_s": self.step_s, "grad_norm": float(seed != SEEDS["flat"])}
            self._say(job, Step, step=step, metrics=told)
            if seed == SEEDS["dies"]:
                print("the stand-in dies of its seed", flush=True)
                os.kill(os.getpid(), 9)
            every = plan.checkpointing.every_steps
            if step == last_step or (every and step % every == 0):
                self._save(job, step, state)
                saved_step = step
            if seed == SEEDS["dies_saved"] and step < last_step:
                os.kill(os.getpid(), 9)
        if plan.probe:
            self._say(job, Probed, step=step, logprobs=probe_logprobs(state, plan.probe))
        return Succeeded, {"step": step}

    def _start(self, job: Job) -> tuple[int, str]:
        start = job.start or job.plan.initial_checkpoint
        if start is None:
            return 0, str(job.plan.seed)
        folder = stage(start, self.paths.root / "cache", S3Settings())
        content = json.loads((folder / "state.json").read_bytes())
        assert job.start is not None or content["step"] == job.plan.first_step
        return content["step"], content["state"]

    def _save(self, job: Job, step: int, state: str) -> None:
        folder = Path(job.checkpoint_dir) / f"step-{step:08d}"
        write_atomically(folder / "weights" / "adapter_model.safetensors", _weights(state))
        write_atomically(folder / "weights" / "adapter_config.json", b'{"r": 16}')
        write_atomically(folder / "state.json", json.dumps({"step": step, "state": state}).encode())
        self._say(job, Saved, step=step, path=str(folder), manifest_sha256=seal(folder))

    def _say(self, job: Job, kind: type, /, **fields: object) -> None:
        self.seq += 1
        event = kind(seq=self.seq, time=time.time(), **fields)
        with Path(job.log_path).open("ab") as log:
            log.write(event.model_dump_json().encode() + b"\n")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--step-s", type=float, default=0.01)
    given = parser.parse_args(arguments)
    StandIn(given.root, given.step_s).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
