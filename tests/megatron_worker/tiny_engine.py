"""A small, honest Engine: an embedding and an output matrix, with LoRA beside the latter, data-parallel over gloo.

It really trains, saves, offloads and resumes, and loads in a second. As a program it is a worker around this engine:

    python -m tests.megatron_worker.tiny_engine --root FOLDER

Shape suffixes: T tokens, N targets, V vocabulary, H hidden size, R rank.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from longshore.training import Adam, Full, Layout, Lora
from megatron_worker.__main__ import main
from megatron_worker.engine import Batch, EngineInfo, LossFunction, Memory, Norms, Outputs, Part, Scores, over_ranks
from megatron_worker.head.logprobs import score_targets, whole_vocabulary
from shared.errors import CorruptArtifact, InvalidInput
from shared.jobs.job import JobPlan
from shared.models import peft as peft_format

VOCAB_SIZE, HIDDEN_SIZE = 64, 16
SINGLE = Layout()


def write_tiny_weights(folder: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (VOCAB_SIZE, HIDDEN_SIZE)
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name in ("embed", "out")}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")


@dataclass
class _Slot:
    """An adapter and, if it is trained, its optimizer; under None the base that is trained."""

    lora: Lora | None
    tensors: dict[str, Tensor]
    optimizer: torch.optim.AdamW | None


class TinyEngine:
    recompute = False

    def __init__(self, folder: Path, layout: Layout = SINGLE) -> None:
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        cpu = torch.device("cpu")
        self.facts = EngineInfo(layout, "float32", cpu, self._rank, self._rank, layout.dp, VOCAB_SIZE, HIDDEN_SIZE)
        self._base = _read(folder / "model.safetensors")
        self._source = folder
        self._host: dict[int, Tensor] = {}
        self._slots: dict[str | None, _Slot] = {}
        self._active: str | None = None

    # What is trained.

    def add_adapter(self, name: str, lora: Lora, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        bound = HIDDEN_SIZE**-0.5
        a_RH = torch.empty(lora.rank, HIDDEN_SIZE).uniform_(-bound, bound, generator=generator)
        self._train(name, lora, {"lora_A": a_RH, "lora_B": torch.zeros(VOCAB_SIZE, lora.rank)})

    def load_adapter(self, name: str, folder: Path, lora: Lora | None, trainable: bool, seed: int = 0) -> None:
        if trainable:
            assert lora is not None
            self.add_adapter(name, lora, 0)
            self._fill(_read(folder / "adapter_model.safetensors"), folder)
        else:
            # a tiny adapter has no config: it is like the one being trained, or of the default's scale
            tensors = _read(folder / "adapter_model.safetensors")
            rank = len(tensors["lora_A"])
            beside = next((slot.lora for slot in self._slots.values() if slot.optimizer), None)
            assert name not in self._slots
            self._slots[name] = _Slot(beside or Lora(rank=rank, alpha=2 * rank), tensors, None)
        self.set_adapter(name)

    def set_adapter(self, name: str | None) -> None:
        assert name is None or name in self._slots
        self._active = name

    def drop_slot(self, slot: str | None) -> None:
        if self._slots.pop(slot, None) is not None and slot is None:
            self._base = _read(self._source / "model.safetensors")
        self._active = None if self._active == slot else self._active

    def train_full(self, full: Full, seed: int = 0) -> None:
        self._train(None, None, self._base)

    def _train(self, name: str | None, lora: Lora | None, tensors: dict[str, Tensor]) -> None:
        assert name not in self._slots, f"slot {name!r} is taken"
        assert None not in self._slots and (name is not None or not self._slots), "the base is trained alone"
        for tensor in tensors.values():
            tensor.requires_grad_(True)
        self._slots[name] = _Slot(lora, tensors, torch.optim.AdamW(tensors.values(), lr=0.0, weight_decay=0.0))
        self._active = name

    @property
    def _trained(self) -> _Slot:
        slot = self._slots[self._active]
        assert slot.optimizer is not None, "it is not trained"
        return slot

    # A step.

    def forward(self, batch: Batch, outputs: Outputs) -> Scores:
        token_TH = self._base["embed"][batch.token_id_T]
        parent_TH = token_TH[batch.parent_T.clamp(min=0)] * (batch.parent_T >= 0)[:, None]
        hidden_NH = (token_TH + 0.5 * parent_TH)[batch.hidden_index_N]
        return score_targets(hidden_NH, self._output_VH(), batch.label_N, outputs, whole_vocabulary(VOCAB_SIZE))

    def _output_VH(self) -> Tensor:
        if self._active is None:
            return self._base["out"]
        slot = self._slots[self._active]
        assert slot.lora is not None
        return self._base["out"] + slot.lora.alpha / slot.lora.rank * slot.tensors["lora_B"] @ slot.tensors["lora_A"]

    def forward_backward(self, batch: Batch, loss: LossFunction) -> dict[str, Tensor]:
        sums = loss.sums(self.forward(batch, loss.outputs), batch)
        sums.loss.backward()
        return sums.detached()

    def forward_backward_all(self, batches, loss: LossFunction) -> Iterator[tuple[Batch, dict[str, Tensor]]]:
        return ((batch, self.forward_backward(batch, loss)) for batch in batches)

    def reduce(self, sums: dict[str, Tensor]) -> dict[str, float]:
        return over_ranks(sums, self.facts.dp_rank, self.facts.dp_size, self._sum_over_ranks)

    def _sum_over_ranks(self, tensor: Tensor) -> None:
        if self.facts.dp_size > 1:
            dist.all_reduce(tensor)

    def optim_step(self, adam: Adam, learning_rate: float, denominator: float) -> Norms:
        tensors, optimizer = self._trained.tensors, self._trained.optimizer
        assert optimizer is not None
        for tensor in tensors.values():
            tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            self._sum_over_ranks(tensor.grad)
            tensor.grad /= denominator
        norm = float(torch.nn.utils.clip_grad_norm_(tensors.values(), adam.clip_norm or 1e30))
        if torch.isfinite(torch.tensor(norm)):
            optimizer.param_groups[0].update(lr=learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps)
            optimizer.step()
        self.zero_grad()
        return Norms(norm, bool(adam.clip_norm and norm > adam.clip_norm))

    def zero_grad(self) -> None:
        for tensor in self._trained.tensors.values():
            tensor.grad = None

    def greedy(self, prompts: list[list[int]], max_tokens: int, stop_ids: frozenset[int]) -> list[list[int]]:
        with torch.no_grad():
            return [self._continue(prompt, max_tokens, stop_ids) for prompt in prompts]

    def _continue(self, prompt: list[int], max_tokens: int, stop_ids: frozenset[int]) -> list[int]:
        ids = list(prompt)
        while len(ids) < len(prompt) + max_tokens:
            hidden_H = self._base["embed"][ids[-1]] + (0.5 * self._base["embed"][ids[-2]] if len(ids) > 1 else 0)
            following = int((self._output_VH() @ hidden_H).argmax())
            if following in stop_ids:
                break
            ids.append(following)
        return ids[len(prompt) :]

    # State.

    def save(self, folder: Path) -> None:
        slot = self._trained
        if self.facts.rank != 0:
            return
        (folder / "weights").mkdir(parents=True)
        (folder / "optimizer").mkdir()
        tensors = {n: t.detach().contiguous() for n, t in slot.tensors.items()}
        save_file(tensors, folder / "weights" / _file_of(slot))
        if slot.lora is not None:
            peft_format.write_config(folder / "weights", slot.lora, slot.tensors)
        assert slot.optimizer is not None
        moments = {
            f"{moment}.{n}": slot.optimizer.state[t][moment]
            for n, t in slot.tensors.items()
            for moment in ("step", "exp_avg", "exp_avg_sq")
            if t in slot.optimizer.state
        }
        save_file(moments, folder / "optimizer" / "optimizer.safetensors")

    def load(self, folder: Path) -> None:
        slot = self._trained
        self._fill(_read(folder / "weights" / _file_of(slot)), folder)
        assert slot.optimizer is not None
        self.reset_moments()
        for key, value in _read(folder / "optimizer" / "optimizer.safetensors").items():
            moment, name = key.split(".", 1)
            slot.optimizer.state[slot.tensors[name]][moment] = value

    def reset_moments(self) -> None:
        assert self._trained.optimizer is not None
        self._trained.optimizer.state.clear()

    def _fill(self, tensors: dict[str, Tensor], folder: Path) -> None:
        for name, tensor in self._trained.tensors.items():
            if name not in tensors or tensors[name].shape != tensor.shape:
                raise InvalidInput(f"{name} is missing or of another shape", str(folder))
            tensor.data.copy_(tensors[name])

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._base.items()

    def place(self, everything=None, *, weights=None, gradients=None, optimizer=None, slots=None) -> None:
        """All of a slot goes where its weights go; dropped gradients are none."""
        for name in (None, *self._slots) if slots is None else slots:
            if (gradients or everything) == "dropped":
                for tensor in self._tensors(name):
                    tensor.grad = None
            for tensor in self._tensors(name):
                self._move(tensor, weights or everything)

    def _move(self, tensor: Tensor, where: str | None) -> None:
        storage = tensor.untyped_storage()
        if where == "host" and storage.nbytes():
            self._host[id(tensor)] = tensor.detach().clone()
            storage.resize_(0)
        if where == "device" and not storage.nbytes():
            host = self._host.pop(id(tensor))
            storage.resize_(host.nbytes)
            tensor.data.copy_(host)

    def _tensors(self, name: str | None) -> list[Tensor]:
        found = list(self._base.values()) if name is None else []
        if (slot := self._slots.get(name)) is not None:
            moments = slot.optimizer.state.values() if slot.optimizer else ()
            found += [*slot.tensors.values(), *(t for m in moments for t in m.values())]
        return list({id(tensor): tensor for tensor in found}.values())

    @contextmanager
    def training(self) -> Iterator[None]:
        self.place("device", slots={None, self._active})
        yield

    scoring = training

    def slot_bytes(self, trainable: Lora | Full) -> dict[Part, int]:
        """In float32, with two moments; AdamW's step counts are left out."""
        rank = trainable.rank if isinstance(trainable, Lora) else 0
        weights = 4 * rank * (HIDDEN_SIZE + VOCAB_SIZE) or sum(t.nbytes for t in self._base.values())
        return {"weights": weights if rank else 0, "gradients": weights, "optimizer": 2 * weights}

    def memory(self) -> Memory:
        return Memory(
            device_bytes=sum(
                t.untyped_storage().nbytes() for name in {None, *self._slots} for t in self._tensors(name)
            ),
            host_bytes=sum(t.nbytes for t in self._host.values()),
        )


def _file_of(slot: _Slot) -> str:
    return "adapter_model.safetensors" if slot.lora else "model.safetensors"


def _read(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise CorruptArtifact("the file is missing", str(path))
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


class SlowEngine(TinyEngine):
    """Takes its time over a bin, so that a test can do something meanwhile."""

    seconds_per_bin = 0.0

    def forward_backward(self, batch: Batch, loss: LossFunction) -> dict[str, Tensor]:
        import time

        time.sleep(self.seconds_per_bin)
        return super().forward_backward(batch, loss)


def build(plan: JobPlan, model: Path) -> TinyEngine:
    engine = SlowEngine(model, plan.layout)
    engine.seconds_per_bin = float(os.environ.get("TINY_ENGINE_SECONDS_PER_BIN", "0"))
    return engine


if __name__ == "__main__":
    sys.exit(main(build=build))
