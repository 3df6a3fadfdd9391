"""Converts Tinker's data and losses to commands of sessions, and their results to Tinker's format.

Tinker's losses are sums over a datum's targets, whose place i follows the token i of the input. Shape suffixes:
N places of a datum, K targets in each.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longshore.commands import MAX_ANSWER, MAX_TOP_K, CommandResult, ForwardBackwardOptions, ForwardOptions
from longshore.fields import Frozen
from longshore.losses import CISPO, DRO, GSPO, PPO, CrossEntropy, PolicyLoss, Reinforce, TruncatedReinforce
from service.apis.tinker import wire
from service.apis.tinker.records import AskedLoss
from service.decoding import SMALL_BYTES
from shared.errors import InvalidInput, NotFound
from shared.jobs.commands import read_command, with_data
from shared.jobs.packed import Units

Floats = NDArray[np.float64]
Config = Mapping[str, float | str]
Columns = dict[str, NDArray[Any]]
"""Of a datum, by their names in packed data."""
_CLIP_LOW, _CLIP_HIGH, _BETA, _KL = "clip_low_threshold", "clip_high_threshold", "beta", "kl_coeff"
_LOW, _HIGH, _DRO_BETA, _KL_COEFF = 0.8, 1.2, 0.05, 0.01
_MAX_LOG_RATIO = 20.0  # as the worker bounds it
POLICY_INPUTS = ("target_tokens", "logprobs", "advantages")
RATIO_MASK = "sequence_ratio_mask"
STABLE_REINFORCE = "stable_reinforce"
_SERVED = f"cross_entropy, importance_sampling, ppo, cispo, gspo, dro and {STABLE_REINFORCE} are served"
_LOSSES, _COUNTS = ("loss", "loss_sum"), ("weight", "tokens", "sequences", "target_tokens", "num_bins")
_OF_STEP = ("grad_norm", "clipped", "learning_rate", "skipped")
MISSING = {
    "custom": "losses of your own are computed in the client: forward_backward_custom with a function",
}


@dataclass(frozen=True)
class TinkerLoss:
    """A loss of Tinker's: our loss, and its value as Tinker defines it, by log-probabilities, in float64.

    `value`: of arrays of equal shape, of the scored places of one datum: log-probabilities, the sampler's, advantages.
    """

    ours: PolicyLoss
    value: Callable[[Floats, Floats, Floats], Floats]
    settings: tuple[str, ...] = ()


def _ratio(logprobs: Floats, sampled: Floats) -> Floats:
    return np.exp(np.clip(logprobs - sampled, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def policy_loss(name: str, config: Config) -> TinkerLoss:
    """Return a policy loss by Tinker's name and settings. Raises InvalidInput for one that is not served."""
    match name:
        case "importance_sampling":
            return TinkerLoss(Reinforce(), lambda new, old, advantage: -_ratio(new, old) * advantage)
        case "ppo":
            low, high = _bounds(config)

            def surrogate(new: Floats, old: Floats, advantage: Floats) -> Floats:
                return _clipped(_ratio(new, old), low, high, advantage)

            return TinkerLoss(PPO(clip_low=1 - low, clip_high=high - 1), surrogate, (_CLIP_LOW, _CLIP_HIGH))
        case "gspo":
            low, high = _bounds(config)

            def of_sequence(new: Floats, old: Floats, advantage: Floats) -> Floats:
                return _clipped(_ratio(np.full_like(new, np.mean(new - old)), np.zeros_like(new)), low, high, advantage)

            ours = GSPO(aggregation="token_mean", clip_low=1 - low, clip_high=high - 1)
            return TinkerLoss(ours, of_sequence, (_CLIP_LOW, _CLIP_HIGH))
        case "cispo":
            low, high = _bounds(config)

            def weighed(new: Floats, old: Floats, advantage: Floats) -> Floats:
                return -np.clip(_ratio(new, old), low, high) * advantage * new

            return TinkerLoss(CISPO(clip_low=1 - low, clip_high=high - 1), weighed, (_CLIP_LOW, _CLIP_HIGH))
        case "dro":
            beta = _number(config, _BETA, _DRO_BETA)
            if beta <= 0:
                raise InvalidInput("it must be above 0", f"loss_fn_config.{_BETA}")
            return TinkerLoss(
                DRO(beta=beta), lambda new, old, advantage: -advantage * new + beta / 2 * (new - old) ** 2, (_BETA,)
            )
        case "stable_reinforce":
            kl = _number(config, _KL, _KL_COEFF)
            if kl < 0:
                raise InvalidInput("it must be 0 or more", f"loss_fn_config.{_KL}")

            def truncated(new: Floats, old: Floats, advantage: Floats) -> Floats:
                return -np.minimum(_ratio(new, old), 1.0) * advantage * new + kl / 2 * (new - old) ** 2

            return TinkerLoss(TruncatedReinforce(truncation=1.0, old_kl_coefficient=kl), truncated, (_KL,))
        case _:
            reason = MISSING.get(name, _SERVED)
            raise InvalidInput(f"the loss {name[:60] or '(none)'} is not served here: {reason}", "loss_fn")


def _clipped(ratio: Floats, low: float, high: float, advantage: Floats) -> Floats:
    return -np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage)


def _bounds(config: Config) -> tuple[float, float]:
    low, high = _number(config, _CLIP_LOW, _LOW), _number(config, _CLIP_HIGH, _HIGH)
    if not 0 <= low < 1:
        raise InvalidInput("ratios are clipped below: from 0 on, and below 1", f"loss_fn_config.{_CLIP_LOW}")
    if not high > 1:
        raise InvalidInput("ratios are clipped above: above 1", f"loss_fn_config.{_CLIP_HIGH}")
    return low, high


def _number(config: Config, name: str, default: float) -> float:
    value = config.get(name, default)
    if isinstance(value, str) or not math.isfinite(value):
        raise InvalidInput("it must be a number", f"loss_fn_config.{name}")
    return value


def command_of(batch: wire.SentBatch) -> bytes:
    """Translate a batch into a command's file. Raises InvalidInput that names the datum and the input at fault."""
    if batch.loss_fn == "cross_entropy":
        known: tuple[str, ...] = ()
        loss: CrossEntropy | PolicyLoss = CrossEntropy()
        make = _weighed_datum
    else:
        found = policy_loss(batch.loss_fn, batch.config)
        known, loss = found.settings, found.ours
        make = {"gspo": _sequence_datum, STABLE_REINFORCE: _sampled_datum}.get(batch.loss_fn, _policy_datum)
    for name in batch.config:
        if name not in known:
            raise InvalidInput(f"{batch.loss_fn} has no such setting", f"loss_fn_config.{name[:60]}")
    data = [make(datum, f"data[{number}]") for number, datum in enumerate(batch.data)]
    return with_data(ForwardOptions(score_all=True) if batch.forward_only else ForwardBackwardOptions(loss=loss), data)


def _weighed_datum(datum: wire.SentDatum, place: str) -> Columns:
    """A datum of cross_entropy: the tokens that follow, or any targets, one or several in a place."""
    targets = _flat_if_single(_input(datum, "target_tokens", place))
    _only(datum, ("target_tokens", "weights"), place)
    given = datum.inputs.get("weights")
    if given is None:
        weights = wire.Tensor(np.ones(len(targets.values), np.float32), targets.shape, targets.ends, targets.columns)
    else:
        weights = _flat_if_single(given)
    if weights.shape != targets.shape:
        message = f"its shape is {list(weights.shape)}, and that of target_tokens {list(targets.shape)}"
        raise InvalidInput(message, f"{place}.weights")
    _check_places(datum, targets, place)
    targets_NK, weights_NK = _dense(targets, f"{place}.target_tokens"), _dense(weights, f"{place}.weights")
    weight_N = _floats(weights_NK.ravel(), f"{place}.weights")
    if len(targets.shape) == 1 and np.array_equal(targets.values[:-1], datum.tokens[1:]):
        return {"token_id": _ids(datum, targets.values[-1:], place), "weight": weight_N}
    label_N = _in_range(targets_NK.ravel(), f"{place}.target_tokens")
    hidden_N = np.repeat(np.arange(len(targets_NK)), targets_NK.shape[1])
    token_id = _ids(datum, np.zeros(1, np.int64), place)
    return {"token_id": token_id, "hidden_index": hidden_N, "label": label_N, "weight": weight_N}


def _flat_if_single(tensor: wire.Tensor) -> wire.Tensor:
    """Return a dense column [N, 1] as [N]."""
    return wire.Tensor(tensor.values, tensor.shape[:1]) if tensor.shape[1:] == (1,) and tensor.ends is None else tensor


def _sequence_datum(datum: wire.SentDatum, place: str) -> Columns:
    """A datum of gspo: the places that the mask names are scored, and the sequence's ratio is of these."""
    mask = _input(datum, RATIO_MASK, place)
    plain = wire.SentDatum(datum.tokens, {name: each for name, each in datum.inputs.items() if name != RATIO_MASK})
    found = _policy_datum(plain, place)
    _check_column(datum, RATIO_MASK, mask, place)
    is_masked_N = _floats(mask.values, f"{place}.{RATIO_MASK}") != 0
    if not is_masked_N.any():
        raise InvalidInput("it names no place: the sequence has no ratio", f"{place}.{RATIO_MASK}")
    return _scored_in(is_masked_N, found, f"{RATIO_MASK} names it", f"{RATIO_MASK} leaves its place out", place)


def _sampled_datum(datum: wire.SentDatum, place: str) -> Columns:
    """A datum of stable_reinforce: the sampled places are scored, whose log-probabilities are the sampler's.

    Prompts have none, and the pull towards the sampler would be towards a probability of 1.
    """
    found = _policy_datum(datum, place)
    sizes = [length for length, _ in datum.origins]
    if not sizes:
        message = "the loss needs the provenance of targets, which says what was sampled: Datum.with_provenance"
        raise InvalidInput(message, f"{place}.loss_fn_input_spans")
    if min(sizes) < 1 or sum(sizes) != len(datum.tokens):
        message = f"spans of {sum(sizes):,} tokens for {len(datum.tokens):,} targets: one after the other, each above 0"
        raise InvalidInput(message, f"{place}.loss_fn_input_spans")
    is_sampled_N = np.repeat([sampled for _, sampled in datum.origins], sizes)
    return _scored_in(is_sampled_N, found, "it was sampled", "its place was not sampled", place)


def _scored_in(is_scored_N: NDArray[Any], found: Columns, inside: str, outside: str, place: str) -> Columns:
    """Return the columns with these places scored alone. Raises InvalidInput for one that contradicts them."""
    is_left_out_N = found.get("weight", np.ones(len(is_scored_N))) == 0
    if (wrong_N := is_scored_N & is_left_out_N).any():
        message = f"it is not the token that follows, and {inside}"
        raise InvalidInput(message, f"{place}.target_tokens[{int(np.flatnonzero(wrong_N)[0])}]")
    if (wrong_N := ~is_scored_N & (found["advantage"] != 0)).any():
        message = f"it is not 0, and {outside}: such places are not trained here"
        raise InvalidInput(message, f"{place}.advantages[{int(np.flatnonzero(wrong_N)[0])}]")
    return found | {"weight": is_scored_N.astype(np.float32)}


def _check_column(datum: wire.SentDatum, name: str, column: wire.Tensor, place: str) -> None:
    if column.ends is not None or column.shape != (len(datum.tokens),):
        message = f"its shape is {list(column.shape)}: one number for each of the {len(datum.tokens)} tokens"
        raise InvalidInput(message, f"{place}.{name}")


def _policy_datum(datum: wire.SentDatum, place: str) -> Columns:
    """A datum of a policy loss. Places whose advantage is 0 may name any target, and are not scored if it is another
    one than the token that follows.
    """
    columns = {name: _input(datum, name, place) for name in POLICY_INPUTS}
    _only(datum, POLICY_INPUTS, place)
    targets = columns["target_tokens"]
    _check_places(datum, targets, place)
    for name, column in columns.items():
        _check_column(datum, name, column, place)
    tokens_N, advantage_N = np.asarray(datum.tokens, np.int64), columns["advantages"].values
    differs_N = np.append(targets.values[:-1] != tokens_N[1:], False)
    if np.any(differs_N & (advantage_N != 0)):
        at = int(np.flatnonzero(differs_N & (advantage_N != 0))[0])
        message = "it is not the token that follows: a policy loss is of the sequence itself"
        raise InvalidInput(message, f"{place}.target_tokens[{at}]")
    found = {
        "token_id": _ids(datum, targets.values[-1:], place),
        "advantage": _floats(advantage_N, f"{place}.advantages"),
        "old_logprob": _floats(columns["logprobs"].values, f"{place}.logprobs"),
    }
    return found | {"weight": (~differs_N).astype(np.float32)} if np.any(differs_N) else found


def _input(datum: wire.SentDatum, name: str, place: str) -> wire.Tensor:
    found = datum.inputs.get(name)
    if found is None:
        raise InvalidInput(
            f"the loss needs {name}, and got {', '.join(sorted(datum.inputs))[:200] or 'nothing'}", place
        )
    wanted = "i" if name == "target_tokens" else "f"
    if found.values.dtype.kind != wanted:
        kind = {"i": "integers", "f": "float32"}[wanted]
        raise InvalidInput(f"these are {kind}, and {found.values.dtype.name} came", f"{place}.{name}")
    return found


def _only(datum: wire.SentDatum, names: tuple[str, ...], place: str) -> None:
    for name in datum.inputs:
        if name not in names:
            raise InvalidInput("this loss has no such input here", f"{place}.{name[:60]}")
        _input(datum, name, place)


def _check_places(datum: wire.SentDatum, targets: wire.Tensor, place: str) -> None:
    if not len(datum.tokens):
        raise InvalidInput("there is no token", f"{place}.model_input")
    if targets.shape[0] != len(datum.tokens):
        message = f"{targets.shape[0]} places for {len(datum.tokens)} tokens of the input: one for each"
        raise InvalidInput(message, f"{place}.target_tokens")
    if len(targets.shape) == 2 and targets.ends is None and targets.shape[1] > MAX_TOP_K:
        raise InvalidInput(f"at most {MAX_TOP_K} targets in a place", f"{place}.target_tokens")


def _ids(datum: wire.SentDatum, last: NDArray[Any], place: str) -> NDArray[Any]:
    """Return the whole sequence, whose last token the input does not have."""
    tokens = _in_range(datum.tokens, f"{place}.model_input")
    return np.append(tokens, _in_range(last, f"{place}.target_tokens"))


def _in_range(ids: NDArray[Any], place: str) -> NDArray[Any]:
    if ids.size and not (ids.min() >= 0 and ids.max() < 2**31):
        raise InvalidInput("token ids are from 0 on, and below 2^31", place)
    return ids


def _dense(tensor: wire.Tensor, place: str) -> NDArray[Any]:
    """Return a tensor as a matrix [N, K]: cells that a sparse one does not list are 0. Its size is limited."""
    if tensor.ends is None or tensor.columns is None:
        return tensor.values.reshape(tensor.shape[0], -1)
    if tensor.shape[1] > MAX_TOP_K or tensor.shape[0] * tensor.shape[1] > MAX_ANSWER:
        raise InvalidInput(f"at most {MAX_TOP_K} in a place, and {MAX_ANSWER:,} of a sequence", place)
    filled_NK = np.zeros(tensor.shape, tensor.values.dtype)
    filled_NK[np.repeat(np.arange(tensor.shape[0]), np.diff(tensor.ends)), tensor.columns] = tensor.values
    return filled_NK


def _floats(values: NDArray[Any], place: str) -> NDArray[Any]:
    if not np.all(np.isfinite(values)):
        raise InvalidInput("it contains a value that is not a number", place)
    return values


# Results.


def scores_and_metrics(
    data: bytes, loss_fn: str, config: Config, result: CommandResult
) -> tuple[list[wire.WireScores], dict[str, float]]:
    """Return the scores of each datum by position, and metrics whose names say how to combine chunks.

    A position of weight 0 was not scored; its log-probability is returned as 0.

    Args:
        data: the command's file.
    """
    command, units = read_command(data)
    assert units is not None and result.data is not None
    ends = units.target_offsets
    is_scored_N = (units.columns["weight"] != 0) | isinstance(command, ForwardOptions)
    logprob_N = np.zeros(len(is_scored_N), np.float32)
    logprob_N[is_scored_N] = [np.nan if each is None else each for scores in result.data for each in scores.logprobs]
    sizes = np.diff(ends) // (np.diff(units.token_offsets) - 1)  # all places of a datum have equally many targets
    of_data = [slice(*each) for each in pairwise(ends)]
    shapes = [(int(size),) if size > 1 else () for size in sizes]
    found = [wire.WireScores(logprob_N[places], shape) for places, shape in zip(of_data, shapes, strict=True)]
    total = sum(_loss(units, each, logprob_N[each].astype(np.float64), loss_fn, config) for each in of_data)
    metrics = {
        f"{name}:{'max' if name.endswith('_max') else 'sum' if name in _COUNTS else 'mean'}": value
        for name, value in result.metrics.items()
        if name not in _LOSSES
    }
    # Tinker's packages do not have this loss's formula: each pass tells its client which one was computed.
    told = {f"{STABLE_REINFORCE}_computed_as_truncated_reinforce:max": 1.0} if loss_fn == STABLE_REINFORCE else {}
    return found, metrics | {"loss:sum": total} | told


def metrics_of_step(result: CommandResult) -> dict[str, float]:
    """Return the metrics of an optimizer step. Those of its gradients came with the gradients."""
    return {f"{name}:mean": value for name, value in result.metrics.items() if name in _OF_STEP}


def _loss(units: Units, places: slice, logprobs_N: Floats, loss_fn: str, config: Config) -> float:
    """Return the loss of a datum, whose targets have these places, as Tinker defines it: a sum."""
    weights_N = units.columns["weight"][places].astype(np.float64)
    if loss_fn == "cross_entropy":
        return float(-np.sum(weights_N * logprobs_N))
    old_N, advantage_N = (units.columns[name][places].astype(np.float64) for name in ("old_logprob", "advantage"))
    scored = weights_N != 0
    values = policy_loss(loss_fn, config).value(logprobs_N[scored], old_N[scored], advantage_N[scored])
    return float(np.sum(weights_N[scored] * values))


# Small requests are read in the service's process. A child reads others, whose input and output are files.

MAX_COMMAND_BYTES = 32 << 20
"""Of a command as it is stored, where a sparse matrix has its empty cells, too."""
_SMALL_PLAIN_BYTES = 4 * SMALL_BYTES


class Head(Frozen):
    """Whose request it is: a model's, by its number."""

    model_id: str
    seq_id: int


def is_small(body: bytes, encoding: str) -> bool:
    """True for a batch that is read faster than a child begins. Raises InvalidInput as `plain_bytes` does."""
    return len(body) <= SMALL_BYTES and wire.plain_bytes(body, encoding) <= _SMALL_PLAIN_BYTES


def head_of(body: bytes, encoding: str) -> Head:
    """Read a request's model and number, which are known though there may be too much of the rest.

    Raises InvalidInput as `plain_body` does for a body that cannot be decompressed.
    """
    model_id, seq_id = wire.head_of(wire.decompressed(body, encoding))
    return Head(model_id=model_id, seq_id=seq_id)


def head_in_file(body: str, encoding: str) -> Head:
    """`head_of` a file."""
    return head_of(Path(body).read_bytes(), encoding)


def loss_and_command(body: bytes, encoding: str) -> tuple[AskedLoss, bytes]:
    """Return a request's loss and its command. Raises InvalidInput."""
    batch = wire.batch_of(wire.plain_body(body, encoding))
    data = command_of(batch)
    if len(data) > MAX_COMMAND_BYTES:
        rule = f"as a command it has {len(data):,} bytes, and {MAX_COMMAND_BYTES:,} are taken: send less at once"
        raise InvalidInput(rule, "data")
    return AskedLoss(name=batch.loss_fn, config=batch.config), data


def make_command(body: str, encoding: str, made: str) -> AskedLoss:
    """Write a request's command into a file. Returns its loss. Raises InvalidInput."""
    loss, data = loss_and_command(Path(body).read_bytes(), encoding)
    Path(made).write_bytes(data)
    return loss


def scores_of(command: bytes, loss: AskedLoss, result: CommandResult) -> bytes:
    """Return the answer to a command. Raises NotFound for a loss that is not the command's."""
    try:
        return wire.output_bytes(*scores_and_metrics(command, loss.name, loss.config, result))
    except (KeyError, TypeError, ValueError, InvalidInput):  # a client sends the id: its loss may be another request's
        raise NotFound("there is no such request") from None


def write_scores(command: str, loss: AskedLoss, result: CommandResult, made: str) -> None:
    """`scores_of` a command in a file, to a file."""
    Path(made).write_bytes(scores_of(Path(command).read_bytes(), loss, result))
