"""The inputs and outputs of a forward. Only what an input asks for is computed.

Shape suffixes: L tokens of an input, P positions asked about, K labels a position, V vocabulary, H hidden size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, Union

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_worker.engine import Facts
from shared.errors import InvalidInput

Ints = NDArray[np.int64]
FoundT = TypeVar("FoundT")
Inputs = Union["ForwardInput", Sequence["Inputs"], Mapping[str, "Inputs"]]
"""Inputs, in lists and dicts as their user likes. The outputs come in the same ones."""


class AdapterChoice(Enum):
    """A choice of an adapter. `ACTIVE`: the one that is set when the forward begins."""

    ACTIVE = "active"


ACTIVE = AdapterChoice.ACTIVE


@dataclass(frozen=True, eq=False)
class ForwardInput:
    """One sequence, and the outputs that are requested for it.

    Attributes:
        tokens: [L] ids.
        positions: [P], rising: the positions to compute outputs for. By default all; all but the last with
            `target_logprobs` or `entropy`, as nothing follows it. Position p predicts token p + 1.
        target_logprobs: the log-probability of the token that follows each position.
        entropy: of the distribution at each position; a constant.
        labels: [P, K] ids, each scored at its position.
        top_k: how many of the most probable ids to return at each position, with their log-probabilities.
        logits: of the whole vocabulary, float32, not divided by the temperature.
        hidden: the hidden state after the final norm.
        adapter: the name of a slot; None for the base alone.
        temperature: logits are divided by it before the softmax.
    """

    tokens: Sequence[int] | NDArray[np.integer] | Tensor
    positions: Sequence[int] | NDArray[np.integer] | Tensor | None = None
    target_logprobs: bool = False
    entropy: bool = False
    labels: Sequence[Sequence[int]] | NDArray[np.integer] | Tensor | None = None
    top_k: int = 0
    logits: bool = False
    hidden: bool = False
    adapter: str | AdapterChoice | None = ACTIVE
    temperature: float = 1.0


@dataclass(frozen=True, eq=False)
class TopK:
    """The most probable ids, the best first: `id_PK` int64, `logprob_PK` float32 in nats."""

    id_PK: Tensor
    logprob_PK: Tensor


class ForwardOutput:
    """The outputs that an input asked for. Gradients flow through all but entropy and ids.

    To read one that was not asked for raises InvalidInput, which names what asks for it.
    """

    def __init__(self, **found: "Tensor | TopK") -> None:
        self.found = found

    @property
    def target_logprob_P(self) -> Tensor:
        return self._found("target_logprob_P", Tensor, "target_logprobs=True")

    @property
    def entropy_P(self) -> Tensor:
        return self._found("entropy_P", Tensor, "entropy=True")

    @property
    def label_logprob_PK(self) -> Tensor:
        return self._found("label_logprob_PK", Tensor, "labels")

    @property
    def top_k(self) -> TopK:
        return self._found("top_k", TopK, "top_k")

    @property
    def logit_PV(self) -> Tensor:
        return self._found("logit_PV", Tensor, "logits=True")

    @property
    def hidden_PH(self) -> Tensor:
        return self._found("hidden_PH", Tensor, "hidden=True")

    def _found(self, name: str, kind: type[FoundT], asked_by: str) -> FoundT:
        found = self.found.get(name)
        if not isinstance(found, kind):
            raise InvalidInput(f"it was not asked for: {asked_by} in the ForwardInput does", name)
        return found


@dataclass(frozen=True, order=True)
class HeadCall:
    """A kind of output with its settings. Rows of equal questions go through a head together."""

    kind: str
    entropy: bool = False
    temperature: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, eq=False)
class CheckedInput:
    """A checked input, as arrays, with defaults filled in: without labels K is 0."""

    token_L: Ints
    position_P: Ints
    label_PK: Ints
    asked: ForwardInput
    adapter: str | None

    @property
    def is_empty(self) -> bool:
        return not self.questions or not len(self.position_P)

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(question.kind for question in self.questions)

    @property
    def fields(self) -> list[str]:
        """The fields of its ForwardOutput."""
        a = self.asked
        asked = {
            "target_logprob_P": a.target_logprobs,
            "entropy_P": a.entropy,
            "label_logprob_PK": a.labels is not None,
            "top_k": a.top_k > 0,
            "logit_PV": a.logits,
            "hidden_PH": a.hidden,
        }
        return [name for name, is_asked in asked.items() if is_asked]

    @property
    def questions(self) -> list[HeadCall]:
        """The heads that it needs: `scores` compute one log-probability a position, `ranks` labels and top-k."""
        asked, temperature = self.asked, self.asked.temperature
        found = [HeadCall(kind) for kind, is_asked in (("hidden", asked.hidden), ("logits", asked.logits)) if is_asked]
        if asked.labels is not None or asked.top_k:
            found.append(HeadCall("ranks", temperature=temperature, top_k=asked.top_k))
        if asked.target_logprobs or asked.entropy:
            found.append(HeadCall("scores", entropy=asked.entropy, temperature=temperature))
        return found


def leaves(inputs: Inputs, place: str) -> Iterator[tuple[str, ForwardInput]]:
    """Yield inputs, however they are nested, and the place of each. Raises InvalidInput for anything else."""
    match inputs:
        case ForwardInput():
            yield place, inputs
        case Mapping():
            for name, each in inputs.items():
                yield from leaves(each, f"{place}.{name}")
        case Sequence() if not isinstance(inputs, str | bytes):
            for number, each in enumerate(inputs):
                yield from leaves(each, f"{place}[{number}]")
        case _:
            raise InvalidInput(f"a ForwardInput is wanted, or lists and dicts of them, not {type(inputs)}", place)


def nested_alike(inputs: Inputs, outputs: Iterator[ForwardOutput]) -> Any:
    """Return the next outputs in the lists and dicts of their inputs."""
    match inputs:
        case ForwardInput():
            return next(outputs)
        case Mapping():
            return {name: nested_alike(each, outputs) for name, each in inputs.items()}
        case _:
            return [nested_alike(each, outputs) for each in inputs]


def empty_output(request: CheckedInput, facts: Facts) -> ForwardOutput:
    """Return the outputs of an input without positions: tensors without rows, for each requested output."""
    number_0 = torch.zeros(0, device=facts.device)
    number_0K = number_0.view(0, request.asked.top_k)
    fields: dict[str, Tensor | TopK] = {
        "target_logprob_P": number_0,
        "entropy_P": number_0,
        "label_logprob_PK": number_0.view(0, request.label_PK.shape[1]),
        "top_k": TopK(number_0K.long(), number_0K),
        "logit_PV": number_0.view(0, facts.vocab_size),
        "hidden_PH": number_0.view(0, facts.hidden_size),
    }
    return ForwardOutput(**{name: fields[name] for name in request.fields})


def check(asked: ForwardInput, place: str, vocab_size: int, active: str | None) -> CheckedInput:
    """Check an input and fill in its defaults. Raises InvalidInput naming the input, the field and the rule."""
    token_L = _ids(asked.tokens, f"{place}.tokens", vocab_size)
    if token_L.ndim != 1 or not len(token_L):
        raise InvalidInput("a sequence of at least one token is wanted", f"{place}.tokens")
    follows = asked.target_logprobs or asked.entropy
    last = len(token_L) - 1 if follows else len(token_L)
    if asked.positions is None:
        position_P = np.arange(last)
    else:
        position_P = _ids(asked.positions, f"{place}.positions", last)
        if position_P.ndim != 1 or (np.diff(position_P) <= 0).any():
            raise InvalidInput("positions must rise, each once", f"{place}.positions")
    label_PK = np.zeros((len(position_P), 0), dtype=np.int64)
    if asked.labels is not None:
        label_PK = _ids(asked.labels, f"{place}.labels", vocab_size)
        if label_PK.ndim != 2 or len(label_PK) != len(position_P):
            message = f"labels are of shape {label_PK.shape}; a row for each of {len(position_P)} positions is wanted"
            raise InvalidInput(message, f"{place}.labels")
    if not 0 <= asked.top_k <= vocab_size:
        raise InvalidInput(f"top_k must lie between 0 and the vocabulary's {vocab_size}", f"{place}.top_k")
    if not asked.temperature > 0:
        raise InvalidInput("the temperature must be positive", f"{place}.temperature")
    adapter = active if isinstance(asked.adapter, AdapterChoice) else asked.adapter
    return CheckedInput(token_L, position_P, label_PK, asked, adapter)


def _ids(values: object, place: str, bound: int) -> Ints:
    array = np.asarray(values.cpu() if isinstance(values, Tensor) else values)
    if array.size and array.dtype.kind not in "iu":
        raise InvalidInput("whole numbers are wanted", place)
    if array.size and (array.min() < 0 or array.max() >= bound):
        raise InvalidInput(f"{int(array.min())} to {int(array.max())} are not all from 0 to {bound - 1}", place)
    return array.astype(np.int64)
