"""Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438, equations 11 to 16). Pure functions.

An episode is a sequence of a unit; a state is everything before a target. A *move* is an action: a target, or a turn,
which is all contiguous targets of one answer. All in float64. Shape suffixes: N targets of all units, M moves of them,
E episodes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.jobs.losses import Critic
from shared.jobs.packed import Floats, Ints, Units


@dataclass(frozen=True)
class Moves:
    """The moves of all episodes, in order.

    Attributes:
        first_M: the target that each begins with; its state is the move's.
        of_N: the move of each target.
        ends_M: it is the last of its episode.
        goes_on_M: it is no move, but the state in which an episode was cut off: its value replaces the later rewards.
    """

    first_M: Ints
    of_N: Ints
    ends_M: NDArray[np.bool_]
    goes_on_M: NDArray[np.bool_]


@dataclass(frozen=True)
class Estimates:
    """For each move its advantage, the target of its state's value, and the discounted sum of its later rewards."""

    advantage_M: NDArray[np.float64]
    return_M: NDArray[np.float64]
    reward_to_come_M: NDArray[np.float64]


def moves_of(units: Units, per_turn: bool) -> Moves:
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
    goes_on_N = ends_N & ~weighs_N & is_trained_E[episode_N]
    begins_N = starts_N | goes_on_N
    begins_N |= np.append(True, np.diff(position_N) != 1)[: len(begins_N)] if per_turn else True
    first_M = np.flatnonzero(begins_N)
    last_M = np.append(first_M[1:], len(begins_N)) - 1
    return Moves(first_M, np.cumsum(begins_N) - 1, ends_N[last_M], goes_on_N[first_M])


def _changes(values_N: Ints) -> NDArray[np.bool_]:
    """Return True where a column's value differs from the one before, and at its first place."""
    return np.append(True, values_N[1:] != values_N[:-1])[: len(values_N)]


def estimate(moves: Moves, reward_N: Floats, value_N: Floats, critic: Critic) -> Estimates:
    """Estimate advantages from rewards and values of targets, [N]. A NaN makes only its episode NaN."""
    reward_M = np.add.reduceat(reward_N.astype(np.float64), moves.first_M)
    value_M = value_N.astype(np.float64)[moves.first_M]
    advantage_M = _discounted(moves, reward_M, value_M, critic.gamma, critic.gae_lambda)
    whole_M = _discounted(moves, reward_M, value_M, critic.gamma, 1.0)
    return Estimates(advantage_M, advantage_M + value_M, whole_M + value_M)


def _discounted(
    moves: Moves, reward_M: NDArray[np.float64], value_M: NDArray[np.float64], gamma: float, lam: float
) -> NDArray[np.float64]:
    """Return the sums of (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V(s_{t+1}) - V(s_t); 0 at a cut.

    All episodes are gone through at once, from their ends: as many steps as the longest has moves.
    """
    next_M = np.append(value_M[1:], 0.0) * ~moves.ends_M
    delta_M = np.where(moves.goes_on_M, 0.0, reward_M + gamma * next_M - value_M)
    last_E = np.flatnonzero(moves.ends_M)
    length_E = np.diff(np.append(-1, last_E))
    advantage_M, carried_E = np.zeros_like(delta_M), np.zeros(len(last_E))
    for back in range(int(length_E.max(initial=0))):
        live_E = length_E > back
        at = last_E[live_E] - back
        carried_E[live_E] = delta_M[at] + gamma * lam * carried_E[live_E]
        advantage_M[at] = carried_E[live_E]
    return advantage_M
