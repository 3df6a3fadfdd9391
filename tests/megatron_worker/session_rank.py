"""TrainerRank's calls, said in a session's commands: what a client computes is here, the rest on a worker.

One session an adapter, all on one worker of this process (on several ranks: on each). The tests of TrainerRank that
take a `rank` run on it as well. These cannot be said in commands:

- logits of the whole vocabulary and hidden states: a session answers in scores of tokens, 128 a place at most;
- memory budgets and the micro-batches made for them: a session's micro-batches have `max_tokens`;
- inputs of one data-parallel rank, and ranks that go in step or disagree: a session's data are dealt out by its worker;
- graphs that are alive or cut off: they are the client's own, between `forward` and `forward_backward`;
- frozen adapters and the active one: each session trains one slot, and `adapter: false` asks its base;
- a step of several adapters that one of them refuses: each session makes its own;
- how many tokens a forward computes: only `forward_backward` says it (test_session.py);
- kinds of wrong input: commands have rules and places of their own (test_session.py);
- bytes of a job's file: forwards of whole bins are not a session's to choose (test_session.py has its own).

Shape suffixes: P positions of an input, W ids that are scored in each, K most likely ids.
"""

import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from longshore.commands import CommandResult, Datum, Forward, ForwardBackward, OptimStep, SaveState
from longshore.fields import Artifact
from longshore.training import Adam, Lora
from megatron_worker.engine import EngineInfo, Norms
from megatron_worker.forwards import CheckedInput, check
from megatron_worker.process.job_queue import EventLog
from megatron_worker.process.ranks import Staging, WorkerRanks
from megatron_worker.tensors.slot_engine import Engine
from megatron_worker.trainer_rank import ForwardInput, ForwardOutput, Snapshot, TopK, TrainerRank
from megatron_worker.warm_engine import build_engine
from megatron_worker.worker import Worker
from shared.errors import InvalidInput
from shared.field_rules import first_error
from shared.jobs.commands import Command, LoadStored, Skip, stored_form
from shared.jobs.job import Job, SessionPlan
from shared.models import peft as peft_format
from shared.settings import S3Settings
from shared.storage.artifacts import sha256_file
from shared.storage.files import write_atomically
from shared.storage.paths import MANIFEST
from tests.megatron_worker.workshop import FIRST, sealed

_NO_LABEL_WANTED = [0]  # where only the most likely ids are asked for, some id has to be scored


class _Kind(NamedTuple):
    """What inputs of one command have in common."""

    adapter: str | None
    temperature: float
    entropy: bool
    top_k: int
    labelled: bool


@dataclass(frozen=True)
class _Scored:
    """What a forward answered about an input, as leaves of the client's graph."""

    request: CheckedInput
    id_PW: Tensor
    logprob_PW: Tensor
    top_id_PK: Tensor
    top_logprob_PK: Tensor

    def datum(self) -> Datum | None:
        """The input with the negative derivatives by its scores as weights; None: no derivative."""
        leaves = (self.logprob_PW, self.top_logprob_PK)
        weight_PW, weight_PK = (torch.zeros_like(leaf) if leaf.grad is None else -leaf.grad for leaf in leaves)
        if not (weight_PW.any() or weight_PK.any()):
            return None
        if not _is_labelled(self.request):
            return _plain(self.request, weight_PW[:, 0].tolist())
        ids = torch.cat([self.id_PW, self.top_id_PK], dim=1).tolist()
        return _labelled(self.request, ids, torch.cat([weight_PW, weight_PK], dim=1).tolist())


@dataclass
class _Adapter:
    lora: Lora
    trainable: bool
    job: Job
    number: int = 0


class SessionRank:
    """See the module's docstring. On several ranks all of them call it alike."""

    def __init__(
        self, model: Path, root: Path, ranks: WorkerRanks | None = None, max_tokens: int = 512, **plan: object
    ) -> None:
        """`plan`: fields of a SessionPlan, such as engine, layout or dtype."""
        self._ranks = ranks or WorkerRanks(dist.HashStore(), rank=0, local_rank=0, world_size=1)
        self._worker = Worker(self._ranks, Staging(root / "cache", S3Settings(), self._ranks), build_engine)
        self._root = root
        self._plan = {"model": self._sealed(model), "max_tokens": max_tokens, "save_after_s": 3600, **plan}
        self._adapters: dict[str, _Adapter] = {}
        self._ended: set[str] = set()
        self._num_opened = 0
        self._scored: dict[_Kind, list[_Scored]] = defaultdict(list)
        self.active_adapter: str | None = None

    @property
    def engine(self) -> Engine:
        assert self._worker._warm.dispatcher is not None
        return self._worker._warm.dispatcher.engine

    @property
    def facts(self) -> EngineInfo:
        """The engine's; data parallel is the worker's matter."""
        return replace(self.engine.facts, dp_rank=0, dp_size=1)

    def slot(self, name: str) -> str:
        return self._adapters[name].job.plan.run_id

    # Adapters.

    @property
    def adapters(self) -> dict[str, bool]:
        return {name: adapter.trainable for name, adapter in self._adapters.items()}

    def create_adapter(self, name: str, lora: Lora, seed: int) -> None:
        self._open(name, lora, True, seed=seed)

    def load_adapter(self, name: str, path: Path, trainable: bool, lora: Lora | None = None) -> None:
        self._open(name, lora or peft_format.read_config(path), trainable, initial_adapter=self._sealed(path))

    def _sealed(self, folder: Path) -> Artifact:
        data = sealed(folder).model_dump_json().encode() if self._ranks.rank == 0 else None
        return Artifact.model_validate_json(self._ranks.broadcast(data))

    def _open(self, name: str, lora: Lora, trainable: bool, **plan: object) -> None:
        """A session of this adapter. One of this name is ended once the new one has begun."""
        self._num_opened += 1
        run_id = f"{name}-{self._num_opened}"
        folder = self._root / run_id
        fields = {"run_id": run_id, "job_id": "000001", "trainable": lora, **self._plan, **plan}
        job = Job(
            plan=SessionPlan.model_validate(fields),
            fence=FIRST,
            log_path=str(folder / "log.jsonl"),
            checkpoint_dir=str(folder / "checkpoints"),
            scratch_dir=str(folder / "scratch"),
            commands_dir=str(folder / "commands"),
        )
        (folder / "commands").mkdir(parents=True, exist_ok=True)
        report = EventLog(Path(job.log_path) if self._ranks.rank == 0 else None)
        self._worker._begin(job, report, lambda: run_id in self._ended, lambda: None)
        adapter = _Adapter(lora, trainable, job)
        self._do(adapter, Skip())
        if name in self._adapters:
            self.drop_adapter(name)
        self._adapters[name], self.active_adapter = adapter, name

    def drop_adapter(self, name: str) -> None:
        """Cancel its session."""
        run_id = self._adapters.pop(name).job.plan.run_id
        self._ended.add(run_id)
        while self._worker._advance(run_id) is None:
            pass

    def set_adapter(self, name: str | None) -> None:
        self.active_adapter = name

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        before, self.active_adapter = self.active_adapter, name
        yield
        self.active_adapter = before

    # A step.

    def forward(self, inputs: Sequence[ForwardInput]) -> list[ForwardOutput]:
        requests = [check(said, f"inputs[{n}]", 1 << 31, self.active_adapter) for n, said in enumerate(inputs)]
        outputs, places = [ForwardOutput() for _ in requests], defaultdict[_Kind, list[int]](list)
        for number, request in enumerate(requests):
            assert not (request.asked.logits or request.asked.hidden), "no command asks for these"
            if not request.is_empty:
                asked = request.asked
                kind = _Kind(request.adapter, asked.temperature, asked.entropy, asked.top_k, _is_labelled(request))
                places[kind].append(number)
        for kind, numbers in places.items():
            for number, output in zip(numbers, self._scores(kind, [requests[n] for n in numbers]), strict=True):
                outputs[number] = output
        return outputs

    def _scores(self, kind: _Kind, requests: list[CheckedInput]) -> list[ForwardOutput]:
        asked = Forward(
            data=tuple(_labelled(r, _ids(r)) if kind.labelled else _plain(r, None) for r in requests),
            entropy=kind.entropy,
            top_k=kind.top_k,
            adapter=kind.adapter is not None,
            temperature=kind.temperature,
            share_prefixes=not kind.labelled,
        )
        adapter = self._adapters[kind.adapter] if kind.adapter else next(iter(self._adapters.values()))
        found = self._do(adapter, asked).data
        assert found is not None
        keeps_graph = kind.adapter is not None and adapter.trainable and torch.is_grad_enabled()
        outputs = []
        for request, scores in zip(requests, found, strict=True):
            shape_PWK = (len(request.position_P), len(_ids(request)[0]), kind.top_k)
            # Of a place whose several labels each have them, the first.
            top_id_PK = torch.tensor(scores.top_ids or (), dtype=torch.int64).view(shape_PWK)[:, 0]
            top_logprob_PK = torch.tensor(scores.top_logprobs or ()).view(shape_PWK)[:, 0].clone()
            logprob_PW = torch.tensor(scores.logprobs).view(shape_PWK[:2])
            leaves = [leaf.requires_grad_(keeps_graph) for leaf in (logprob_PW, top_logprob_PK)]
            scored = _Scored(request, torch.tensor(_ids(request)), leaves[0], top_id_PK, leaves[1])
            if keeps_graph:
                self._scored[kind].append(scored)
            outputs.append(_output(scored, scores.entropies))
        return outputs

    def backward(self, loss: Tensor) -> None:
        """Differentiate the client's loss by the scores that it got, and send what came of it as weights."""
        if loss.requires_grad:
            loss.backward()
        for kind, each in self._scored.items():
            data = [datum for scored in each if (datum := scored.datum()) is not None]
            for scored in each:
                scored.logprob_PW.grad = scored.top_logprob_PK.grad = None
            if data:
                assert kind.adapter is not None
                asked = ForwardBackward(
                    data=tuple(data),
                    temperature=kind.temperature,
                    share_prefixes=all(datum.labels is None for datum in data),
                )
                self._do(self._adapters[kind.adapter], asked)

    def optim_step(
        self, adam: Adam, learning_rate: float, denominator: float = 1.0, adapters: Sequence[str] | None = None
    ) -> dict[str, Norms]:
        try:
            asked = OptimStep(learning_rate=learning_rate, optimizer=adam, denominator=denominator)
        except ValidationError as error:  # which the service answers with
            place, rule = first_error(error)
            raise InvalidInput(rule, place) from None
        norms = {}
        for name in [self.active_adapter or ""] if adapters is None else adapters:
            metrics = self._do(self._adapters[name], asked).metrics
            norms[name] = Norms(metrics["grad_norm"], bool(metrics["clipped"]))
        return norms

    def zero_grad(self) -> None:
        """No command does this alone: a step of no length, which leaves its moments. Outputs are forgotten, too."""
        self._scored.clear()
        for adapter in self._adapters.values():
            if adapter.trainable:
                self._do(adapter, OptimStep(learning_rate=0.0, denominator=1.0))

    # State.

    def snapshot(self, name: str) -> Snapshot:
        return Snapshot(self._adapters[name].lora, load_file(self._saved(name) / "weights" / peft_format.WEIGHTS))

    def export(self, name: str, folder: Path) -> None:
        snapshot = self.snapshot(name)
        if self._ranks.rank == 0:
            snapshot.write(folder)

    def save(self, name: str, folder: Path) -> None:
        saved = self._saved(name)
        if self._ranks.rank == 0:
            shutil.copytree(saved, folder)
        self._ranks.barrier()

    def load(self, name: str, folder: Path) -> None:
        state = Artifact(uri=f"file://{folder}", sha256=sha256_file(folder / MANIFEST))
        self._do(self._adapters[name], LoadStored(state="session:step-1", checkpoint=state))

    def _saved(self, name: str) -> Path:
        """The state of the last step, as a checkpoint."""
        adapter = self._adapters[name]
        step = self._do(adapter, SaveState()).step
        return Path(adapter.job.checkpoint_dir) / f"step-{step:08d}"

    def _do(self, adapter: _Adapter, asked: Command) -> CommandResult:
        """Have a command done. Raises InvalidInput with the message of its problem, or of the session's own."""
        adapter.number += 1
        assert adapter.job.commands_dir is not None
        path = Path(adapter.job.commands_dir) / f"{adapter.number:08d}.json"
        result, run_id = path.with_suffix(".result.json"), adapter.job.plan.run_id
        if self._ranks.rank == 0:
            write_atomically(path, stored_form(asked), is_durable=False)
        while not self._ranks.largest([int(result.exists())])[0]:
            while self._ranks.rank == 0 and not self._worker._in_hand[run_id].is_ready():
                time.sleep(0.001)
            if (outcome := self._worker._advance(run_id)) is not None:
                raise InvalidInput(outcome.fault.message if outcome.fault else "the session has ended")
        found = CommandResult.model_validate_json(result.read_bytes())
        if found.problem is not None:
            raise InvalidInput(found.problem.message)
        return found


AnyRank = TrainerRank | SessionRank


def sayable(rank: AnyRank, asked: ForwardInput) -> ForwardInput:
    """The input, less what cannot be asked of this rank."""
    return asked if isinstance(rank, TrainerRank) else replace(asked, logits=False, hidden=False, no_grad=False)


def _is_labelled(request: CheckedInput) -> bool:
    """True if other ids are scored than the tokens that follow, or some behind the last token."""
    return "ranks" in request.kinds or "scores" not in request.kinds


def _ids(request: CheckedInput) -> list[list[int]]:
    """The ids that are scored at each position, [P, W]: the token that follows, and the labels."""
    labels = request.label_PK.tolist()
    follows = [[int(request.token_L[p + 1])] if "scores" in request.kinds else [] for p in request.position_P]
    return [next_one + others or _NO_LABEL_WANTED for next_one, others in zip(follows, labels, strict=True)]


def _plain(request: CheckedInput, weight_P: list[float] | None) -> Datum:
    weight_L = np.zeros(len(request.token_L) - 1)
    weight_L[request.position_P] = 1.0 if weight_P is None else weight_P
    return Datum(tokens=tuple(request.token_L.tolist()), weights=tuple(weight_L.tolist()))


def _labelled(request: CheckedInput, ids: list[list[int]], weights: list[list[float]] | None = None) -> Datum:
    """A token is appended, for labels of the last place to stand at; no other place sees it."""
    labels: list[list[int]] = [[] for _ in request.token_L]
    label_weights: list[list[float]] = [[] for _ in request.token_L]
    for row, position in enumerate(request.position_P):
        labels[position] = ids[row]
        label_weights[position] = weights[row] if weights else [1.0] * len(ids[row])
    tokens = [*request.token_L.tolist(), 0]
    return Datum.model_validate({"tokens": tokens, "labels": labels, "label_weights": label_weights})


def _output(scored: _Scored, entropies: tuple[float | None, ...] | None) -> ForwardOutput:
    request, asked = scored.request, scored.request.asked
    shape_PW = scored.logprob_PW.shape
    found = {
        "target_logprob_P": scored.logprob_PW[:, 0] if asked.target_logprobs else None,
        "entropy_P": None if entropies is None else torch.tensor(entropies).view(shape_PW)[:, 0],
        "label_logprob_PK": None if asked.labels is None else scored.logprob_PW[:, -request.label_PK.shape[1] :],
        "top_k": TopK(scored.top_id_PK, scored.top_logprob_PK) if asked.top_k else None,
    }
    return ForwardOutput(**{name: each for name, each in found.items() if each is not None})
