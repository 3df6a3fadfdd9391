"""Trials of a rank program, which launcher.py starts as `MODULE OUT TRIALS`: a test asks for them in JSON, and each
rank does them."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from pydantic import BaseModel

from megatron_worker.process.ranks import start_group
from tests.megatron_worker.launch import fork_ranks

Trial = TypeVar("Trial", bound=BaseModel)


def run_trials(module: str, out: Path, trials: Sequence[BaseModel], num_ranks: int, timeout_s: float) -> None:
    """All of them in one launch. Results go below `out`."""
    arguments = json.dumps([trial.model_dump(mode="json") for trial in trials])
    fork_ranks(f"tests.megatron_worker.{module}", str(out), arguments, num_ranks=num_ranks, timeout_s=timeout_s)


def given_trials(kind: type[Trial]) -> Iterator[tuple[Trial, Path]]:
    """What a rank was started for, one after another, and where results go: on one thread, over gloo."""
    out, trials = sys.argv[1:]
    torch.set_num_threads(1)
    start_group("gloo")
    for values in json.loads(trials):
        yield kind.model_validate(values), Path(out)
    dist.destroy_process_group()
