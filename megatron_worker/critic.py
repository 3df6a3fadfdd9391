"""The critic of a job: a second slot, whose scalar head estimates the rewards to come.

It scores the job's data with its weights at the job's beginning, and advantages are made from these values. Every step
then updates the policy by the advantages, and the critic by the returns. Only one of the two optimizers is on the
device at a time.

Shape suffixes: N targets of all units, M moves of them.
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
from longshore.losses import Critic, PolicyLoss
from longshore.training import Optimizer
from megatron_worker.dispatch import Dispatcher
from megatron_worker.engine import Outputs, reported
from megatron_worker.losses.supervised import value_loss
from megatron_worker.losses.targets import divergence
from megatron_worker.process.ranks import NotFinite
from megatron_worker.training.batches import PackedBatches, Role, share_of_rank
from shared.errors import CorruptArtifact
from shared.jobs.job import JobCritic
from shared.jobs.packed import Floats, Ints, Units

# --- Generalized advantage estimation ---
# Schulman et al. 2016, arXiv:1506.02438, equations 11 to 16. Pure functions.
#
# An episode is a sequence of a unit; a state is everything before a target. A *move* is an action: a target, or a
# turn, which is all contiguous targets of one answer. All in float64. Shape suffixes: N targets of all units, M moves
# of them, E episodes.


@dataclass(frozen=True)
class Actions:
    """The moves of all episodes, in order.

    Attributes:
        first_M: the target that each begins with; its state is the move's.
        of_N: the move of each target.
        ends_M: it is the last of its episode.
        bootstrap_M: it is no move, but the state in which an episode was cut off: its value replaces the later rewards.
    """

    first_M: Ints
    of_N: Ints
    ends_M: NDArray[np.bool_]
    bootstrap_M: NDArray[np.bool_]


@dataclass(frozen=True)
class Estimates:
    """For each move its advantage, the target of its state's value, and the discounted sum of its later rewards."""

    advantage_M: NDArray[np.float64]
    return_M: NDArray[np.float64]
    reward_to_come_M: NDArray[np.float64]


def moves_of(units: Units, per_turn: bool) -> Actions:
    """Return the moves of units. If a trained episode's last target has no weight, the episode was cut off there."""
    columns, counts = units.columns, np.diff(units.target_offsets)
    unit_N = np.repeat(np.arange(len(counts)), counts)
    position_N = hidden_N = np.asarray(columns["hidden_index"])
    if "position" in columns:  # else units are chains
        position_N = np.asarray(columns["position"])[np.asarray(units.token_offsets)[unit_N] + hidden_N]
    sequence_N = np.asarray(columns.get("sequence", np.zeros_like(unit_N)))
    weighs_N = np.asarray(columns["weight"]) > 0
    starts_N = _changes(unit_N) | _changes(sequence_N)
    ends_N = np.append(starts_N[1:], True)[: len(starts_N)]
    episode_N = np.cumsum(starts_N) - 1
    is_trained_E = np.bincount(episode_N, weights=weighs_N) > 0
    bootstrap_N = ends_N & ~weighs_N & is_trained_E[episode_N]
    begins_N = starts_N | bootstrap_N
    begins_N |= np.append(True, np.diff(position_N) != 1)[: len(begins_N)] if per_turn else True
    first_M = np.flatnonzero(begins_N)
    last_M = np.append(first_M[1:], len(begins_N)) - 1
    return Actions(first_M, np.cumsum(begins_N) - 1, ends_N[last_M], bootstrap_N[first_M])


def _changes(values_N: Ints) -> NDArray[np.bool_]:
    """Return True where a column's value differs from the one before, and at its first place."""
    return np.append(True, values_N[1:] != values_N[:-1])[: len(values_N)]


def estimate(moves: Actions, reward_N: Floats, value_N: Floats, critic: Critic) -> Estimates:
    """Estimate advantages from rewards and values of targets, [N]. A NaN makes only its episode NaN."""
    reward_M = np.add.reduceat(reward_N.astype(np.float64), moves.first_M)
    value_M = value_N.astype(np.float64)[moves.first_M]
    advantage_M = _discounted(moves, reward_M, value_M, critic.gamma, critic.gae_lambda)
    whole_M = _discounted(moves, reward_M, value_M, critic.gamma, 1.0)
    return Estimates(advantage_M, advantage_M + value_M, whole_M + value_M)


def _discounted(
    moves: Actions, reward_M: NDArray[np.float64], value_M: NDArray[np.float64], gamma: float, lam: float
) -> NDArray[np.float64]:
    """Return the sums of (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V(s_{t+1}) - V(s_t); 0 at a cut.

    All episodes are gone through at once, from their ends: as many steps as the longest has moves.
    """
    next_M = np.append(value_M[1:], 0.0) * ~moves.ends_M
    delta_M = np.where(moves.bootstrap_M, 0.0, reward_M + gamma * next_M - value_M)
    last_E = np.flatnonzero(moves.ends_M)
    length_E = np.diff(np.append(-1, last_E))
    advantage_M, carried_E = np.zeros_like(delta_M), np.zeros(len(last_E))
    for back in range(int(length_E.max(initial=0))):
        live_E = length_E > back
        at = last_E[live_E] - back
        carried_E[live_E] = delta_M[at] + gamma * lam * carried_E[live_E]
        advantage_M[at] = carried_E[live_E]
    return advantage_M


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
        self._offload()

    def _offload(self) -> None:
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
        with self._in_place_of_the_policy(), self.dispatcher.resident(self.slot) as engine:
            engine.save(folder / "critic")
        if self.dispatcher.facts.rank == 0:
            (folder / "critic" / _SCALE).write_text(self.scale.model_dump_json())

    @contextmanager
    def _in_place_of_the_policy(self) -> Iterator[None]:
        """Take the policy's gradients and optimizer state off the device for the length of a `with` block."""
        self.dispatcher.engine.place(gradients="dropped", optimizer="host", slots=[self.policy])  # they are zero
        try:
            yield
        finally:
            self._offload()
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
        advantage_N = self._update_critic(data, moves, made, value_N, num_steps)
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

    def _update_critic(
        self, data: PackedBatches, moves: Actions, made: Estimates, value_N: NDArray, num_steps: int
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
            with self.dispatcher.resident(self.slot) as engine:
                if not sums["weight"]:
                    engine.zero_grad()
                    return {}
                norms = engine.optim_step(optimizer, learning_rate, sums["weight"])
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
