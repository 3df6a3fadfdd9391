"""Advantages beside their definition, as sums in float64: ragged, cut and many-turn episodes, shared prefixes."""

from pathlib import Path

import numpy as np
import pytest

from longshore.losses import Critic
from megatron_worker.critic import estimate, moves_of
from shared.jobs.packed import TARGET_COLUMNS, TOKEN_COLUMNS, Units, UnitsWriter
from shared.jobs.prefix_tree import SequenceRow, split_tree


def row(random: np.random.Generator, ids: list[int], sampled: list[bool], is_cut: bool) -> SequenceRow:
    mask_L = np.array(sampled)
    weight_L = mask_L.astype(np.float32)
    if is_cut:
        weight_L[np.flatnonzero(mask_L)[-1]] = 0
    reward_L = (random.normal(size=len(ids)) * (weight_L > 0)).astype(np.float32)
    zeros_L = np.zeros(len(ids), dtype=np.float32)
    return SequenceRow(np.array(ids), mask_L, weight_L, reward_L, zeros_L, zeros_L)


def rows(seed: int) -> list[SequenceRow]:
    """Three groups: answers of one piece, of several turns, and of one token, every third of them cut off."""
    random, found = np.random.default_rng(seed), []
    for _ in range(3):
        prompt = random.integers(5, 90, 3).tolist()
        for number in range(4):
            ids, sampled = list(prompt), [False] * 3
            for turn in range(random.integers(1, 4)):
                if turn:  # what a tool says
                    said = random.integers(5, 90, random.integers(1, 3)).tolist()
                    ids, sampled = ids + said, sampled + [False] * len(said)
                answer = random.integers(5, 8 if turn == 0 else 90, random.integers(1, 5)).tolist()
                ids, sampled = ids + answer, sampled + [True] * len(answer)
            found.append(row(random, ids, sampled, is_cut=number % 3 == 0 and sum(sampled) > 1))
    return found


def units_of(folder: Path, sequences: list[SequenceRow], bin_tokens: int = 24) -> Units:
    writer = UnitsWriter(folder, (*TOKEN_COLUMNS, *TARGET_COLUMNS))
    for unit in split_tree(sequences, bin_tokens):
        writer.append(**unit.columns())
    writer.close()
    return Units(folder)


def episodes(units: Units) -> list[tuple[list[int], list[int]]]:
    """The targets of each sequence, and the positions of their states, unit after unit."""
    found = []
    for unit in range(units.header.num_units):
        packed = units.read_bin(np.array([unit]))
        for sequence in sorted(set(packed.sequence_N.tolist())):
            own = np.flatnonzero(packed.sequence_N == sequence)
            positions = packed.position_T[packed.hidden_index_N[own]].tolist()
            found.append(((own + units.target_offsets[unit]).tolist(), positions))
    return found


def reference(units: Units, values: np.ndarray, critic: Critic) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Equation 16 of the paper, term by term; what values are to be; and the discounted rewards that came."""
    rewards, weights = units.columns["advantage"].astype(float), units.columns["weight"]
    advantage, wanted, to_come = (np.full(len(rewards), np.nan) for _ in range(3))
    for targets, positions in episodes(units):
        is_cut = weights[targets[-1]] == 0
        moves: list[list[int]] = []
        for number, target in enumerate(targets):
            follows = number > 0 and positions[number] == positions[number - 1] + 1
            if critic.per == "turn" and follows and not (is_cut and number == len(targets) - 1):
                moves[-1].append(target)
            else:
                moves.append([target])
        v = [values[move[0]] for move in moves]
        num = len(moves) - is_cut
        r = [sum(rewards[target] for target in move) for move in moves[:num]]
        after = [*v[1:], 0.0]
        delta = [r[t] + critic.gamma * after[t] - v[t] for t in range(num)]
        for t in range(num):
            a = sum((critic.gamma * critic.gae_lambda) ** k * delta[t + k] for k in range(num - t))
            came = sum(critic.gamma**k * r[t + k] for k in range(num - t))
            came += critic.gamma ** (num - t) * v[num] if is_cut else 0.0
            advantage[moves[t]], wanted[moves[t]], to_come[moves[t]] = a, a + v[t], came
    return advantage, wanted, to_come


@pytest.mark.parametrize("per", ["token", "turn"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (0.5, 0.0), (1.0, 0.95)])
def test_advantages_are_their_definition(tmp_path, per, gamma, lam) -> None:
    critic = Critic(gamma=gamma, gae_lambda=lam, per=per)
    units = units_of(tmp_path / "units", rows(3))
    value_N = np.random.default_rng(9).normal(size=units.header.num_targets)
    expected = reference(units, value_N, critic)
    moves = moves_of(units, per == "turn")
    made = estimate(moves, units.columns["advantage"], value_N, critic)
    trained_N = units.columns["weight"] > 0
    assert not trained_N.all() and (len(moves.first_M) < len(trained_N)) == (per == "turn")
    for ours, wanted_N in zip((made.advantage_M, made.return_M, made.reward_to_come_M), expected, strict=True):
        np.testing.assert_allclose(ours[moves.of_N][trained_N], wanted_N[trained_N], rtol=0, atol=1e-12)
    at_cuts = made.advantage_M[moves.bootstrap_M]
    assert len(at_cuts) and not at_cuts.any()


def test_an_episode_without_values_spoils_no_other(tmp_path) -> None:
    units = units_of(tmp_path / "units", rows(4))
    critic, moves = Critic(gae_lambda=0.9), moves_of(units, per_turn=False)
    value_N = np.random.default_rng(9).normal(size=units.header.num_targets)
    whole = estimate(moves, units.columns["advantage"], value_N, critic).advantage_M
    lost, _ = episodes(units)[1]
    value_N[lost] = np.nan
    found = estimate(moves, units.columns["advantage"], value_N, critic).advantage_M
    kept_N = ~np.isin(np.arange(len(value_N)), lost)
    assert np.isnan(found[lost]).all() and np.array_equal(found[kept_N], whole[kept_N])


def test_units_without_positions_are_chains(tmp_path) -> None:
    writer = UnitsWriter(tmp_path / "units", ("token_id", "hidden_index", "label", "weight", "advantage"))
    for length in (3, 5):
        ones = np.ones(length - 1)
        index = np.arange(length - 1)
        writer.append(token_id=np.arange(length), hidden_index=index, label=index + 1, weight=ones, advantage=ones)
    writer.close()
    moves = moves_of(Units(tmp_path / "units"), per_turn=True)
    assert moves.first_M.tolist() == [0, 2] and moves.of_N.tolist() == [0, 0, 1, 1, 1, 1]
    assert moves.ends_M.all() and not moves.bootstrap_M.any()
