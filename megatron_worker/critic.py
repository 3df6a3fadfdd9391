"""The critic of a job: a second slot, whose scalar head estimates the rewards to come.

It scores the job's data with its weights at the job's beginning, and advantages are made from these values. Every step
then updates the policy by the advantages, and the critic by the returns. Only one of the two optimizers is on the
device at a time.

Shape suffixes: N targets of all units, M moves of them (gae.py).
"""

import math
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from longshore.fields import Frozen
from longshore.losses import PolicyLoss
from longshore.training import Optimizer
from megatron_worker.dispatch import Dispatcher
from megatron_worker.engine import Outputs
from megatron_worker.losses.divergence import divergence
from megatron_worker.losses.value import value_loss
from megatron_worker.process.faults import NotFinite
from megatron_worker.sums import reported
from megatron_worker.training.batches import PackedBatches
from megatron_worker.training.gae import Estimates, Moves, estimate, moves_of
from megatron_worker.training.scoring import Role, share_of_rank
from shared.errors import CorruptArtifact
from shared.jobs.job import JobCritic

_SCALE = "scale.json"
_KEEPS = 0.9  # the weight of earlier jobs in the running means
_LEAST = 1e-4  # a scale is not below


class Scale(Frozen):
    """The mean and spread of returns: running means over jobs. `weight`: the weights of the jobs so far, added up.

    As in van Hasselt et al. 2016 (arXiv:1602.07714, section 2.1), without its correction of the head's weights.
    """

    weight: float = 0.0
    mean: float = 0.0
    square: float = 1.0

    @property
    def spread(self) -> float:
        return max(self.square - self.mean**2, _LEAST**2) ** 0.5

    def with_returns(self, mean: float, square: float) -> "Scale":
        weight = _KEEPS * self.weight + 1 - _KEEPS
        new = (1 - _KEEPS) / weight
        return Scale(
            weight=weight,
            mean=self.mean + new * (mean - self.mean),
            square=self.square + new * (square - self.square),
        )


@dataclass
class CriticSlot:
    """See the module's docstring. `policy`: the slot whose critic this is.

    Attributes:
        scale: the unit of its values; if `value_scale` is none, a fresh scale, which changes no value.
        facts: metrics of the estimates at the job's beginning.
    """

    plan: JobCritic
    slot: str
    policy: str
    dispatcher: Dispatcher
    scale: Scale
    facts: dict[str, float] = field(default_factory=dict)
    _data: PackedBatches | None = None

    def make(self, seed: int) -> None:
        """Make fresh weights, which leave the device until they are used."""
        self.dispatcher.create_slot(self.slot, self.plan.trainable, seed)
        self._rest()

    def _rest(self) -> None:
        self.dispatcher.engine.place(gradients="dropped", slots=[self.slot])
        self.dispatcher.engine.place("host", slots=[self.slot])

    def load(self, folder: Path) -> None:
        """Resume from what `save` wrote into a checkpoint's folder. Raises CorruptArtifact if it has no critic."""
        if not (folder / "critic" / _SCALE).exists():
            raise CorruptArtifact("the checkpoint has no critic, and the job trains one", str(folder))
        with self._in_place_of_the_policy():
            self.dispatcher.load_state(self.slot, folder / "critic")
        self.scale = Scale.model_validate_json((folder / "critic" / _SCALE).read_bytes())

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state into a checkpoint's folder; rank 0 writes."""
        with self._in_place_of_the_policy():
            self.dispatcher.save_state(self.slot, folder / "critic")
        if self.dispatcher.facts.rank == 0:
            (folder / "critic" / _SCALE).write_text(self.scale.model_dump_json())

    @contextmanager
    def _in_place_of_the_policy(self) -> Iterator[None]:
        """Take the policy's gradients and optimizer state off the device for the length of a `with` block."""
        self.dispatcher.engine.place(gradients="dropped", optimizer="host", slots=[self.policy])  # they are zero
        try:
            yield
        finally:
            self._rest()
            self.dispatcher.engine.place(gradients="device", optimizer="device", slots=[self.policy])

    def role(self, data: PackedBatches, loss: PolicyLoss, num_steps: int) -> Role:
        """Return the critic as a role: it scores the data, and then puts advantages into it.

        The column `advantage` of the units holds rewards until then.
        """

        def take(found: dict[str, NDArray]) -> None:
            self._estimate(data, loss, num_steps, found["values"][:, 0] * self.scale.spread + self.scale.mean)

        outputs = Outputs(logprob=False, values=True)
        return Role(self.slot, data, range(num_steps), outputs, take, self.plan.trainable.head)

    def _estimate(self, data: PackedBatches, loss: PolicyLoss, num_steps: int, value_N: NDArray) -> None:
        moves = moves_of(data.units, self.plan.per == "turn")
        made = estimate(moves, self._rewards(data, loss), value_N, self.plan)
        advantage_N = self._learn_from(data, moves, made, value_N, num_steps)
        returns_N = made.return_M[moves.of_N]
        self._data = data.again()
        if self.plan.per == "turn":  # a turn's state is the one before its first token
            own_N, weight_N = data.column("weight_N"), np.zeros(len(value_N), dtype=np.float32)
            weight_N[moves.first_M] = own_N[moves.first_M]
            self._data.put("weight_N", weight_N)
        self._data.put("old_logprob_N", self._in_units(value_N))
        self._data.put("advantage_N", self._in_units(returns_N))
        data.put("advantage_N", advantage_N.astype(np.float32))

    def _in_units(self, value_N: NDArray) -> NDArray[np.float32]:
        """Return values in the unit that the head gives them in."""
        return ((value_N - self.scale.mean) / self.scale.spread).astype(np.float32)

    def _rewards(self, data: PackedBatches, loss: PolicyLoss) -> NDArray[np.float64]:
        """Return the rewards of targets, less the KL penalty of trained targets, if it is part of the reward."""
        reward_N = data.column("advantage_N").astype(np.float64)
        if loss.kl is None or loss.kl.placement == "loss":
            return reward_N
        old_N, reference_N = (torch.from_numpy(data.column(name)) for name in ("old_logprob_N", "ref_logprob_N"))
        kl_N = divergence(old_N, reference_N, loss.kl.estimator).double().numpy()
        return reward_N - loss.kl.coefficient * kl_N * (data.column("weight_N") > 0)

    def _learn_from(
        self, data: PackedBatches, moves: Moves, made: Estimates, value_N: NDArray, num_steps: int
    ) -> NDArray[np.float64]:
        """Return the advantages of targets, whitened if they are to be; keep what the step reports, and the scale.

        Means are over the trained targets of all ranks: a unit that several of them score counts as one.
        """
        facts = self.dispatcher.facts
        share_U = share_of_rank(data, num_steps, facts.dp_rank, facts.dp_size)
        share_N = np.repeat(share_U, np.diff(data.units.target_offsets))
        share_N *= data.column("weight_N") > 0
        columns = {
            "advantage": made.advantage_M[moves.of_N],
            "value": value_N.astype(np.float64),
            "return": made.return_M[moves.of_N],
            "to_come": made.reward_to_come_M[moves.of_N],
        }
        columns["error"] = columns["to_come"] - columns["value"]
        own_N = share_N > 0
        sums = {"count": share_N.sum()}
        for name, values_N in columns.items():
            sums |= {f"{name}1": share_N[own_N] @ values_N[own_N], f"{name}2": share_N[own_N] @ values_N[own_N] ** 2}
        found = self.dispatcher.engine.reduce(
            {
                name: torch.tensor(value, dtype=torch.float64, device=self.dispatcher.facts.device)
                for name, value in sums.items()
            }
        )
        count = found.pop("count") or 1.0
        mean = {name: found[f"{name}1"] / count for name in columns}
        variance = {name: max(found[f"{name}2"] / count - mean[name] ** 2, 0.0) for name in columns}
        self.facts = {
            "value_mean": mean["value"],
            "return_mean": mean["return"],
            "advantage_std": variance["advantage"] ** 0.5,
        }
        if variance["to_come"] > 0:
            self.facts["explained_variance"] = 1 - variance["error"] / variance["to_come"]
        if self.plan.value_scale == "running":
            self.scale = self.scale.with_returns(mean["return"], found["return2"] / count)
        if not self.plan.whiten:
            return columns["advantage"]
        whitened_N: NDArray[np.float64] = (columns["advantage"] - mean["advantage"]) / (
            variance["advantage"] + 1e-8
        ) ** 0.5
        return whitened_N

    def step(self, done: int, optimizer: Optimizer, learning_rate: float) -> Generator[None, None, dict[str, float]]:
        """Update the critic by one step's data. Returns its metrics.

        Raises:
            NotFinite: its loss is not, or the gradient's norm. No weight has changed.
        """
        assert self._data is not None, "nothing was estimated"
        began = time.perf_counter()
        self.dispatcher.set_recompute(self.slot, self.policy in self.dispatcher.recomputing)
        with self._in_place_of_the_policy():
            sums = yield from self.dispatcher.forward_backward(self.slot, self._data, done, value_loss(self.plan.clip))
            if not math.isfinite(sums["loss"]):
                raise NotFinite("the critic's loss", sums["loss"])
            if not sums["weight"]:
                self.dispatcher.zero_grad(self.slot)
                return {}
            norms = self.dispatcher.optim_step(self.slot, optimizer, learning_rate, sums["weight"])
            if not math.isfinite(norms.grad_norm):
                raise NotFinite("the norm of the critic's gradient", norms.grad_norm)
            device_bytes = self.dispatcher.engine.memory().device_bytes
        clipped = {n: v for n, v in reported(sums).items() if n == "clipped_fraction"}
        metrics = {"loss": sums["loss"] / sums["weight"], "grad_norm": norms.grad_norm, "learning_rate": learning_rate}
        metrics |= clipped | {"memory_bytes": float(device_bytes)}
        named = {f"critic_{name}": value for name, value in metrics.items()} | self.facts
        if not self.plan.alone:
            return named
        counts = {name: sums[name] for name in ("tokens", "target_tokens", "num_bins")}  # which else are the policy's
        seconds = time.perf_counter() - began
        return named | counts | {"step_s": seconds, "tokens_per_s": sums["tokens"] / seconds}
