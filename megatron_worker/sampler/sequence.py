"""A sample while it is drawn, and its end: at the model's end token, a stop token or string, or the length."""

import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from megatron_worker.sampler.adapters import LoadedAdapter
from megatron_worker.sampler.drawing import NO_PENALTIES, Penalties, PromptScores, uniform
from shared.chat.completions import DrawnBy, Sampling
from shared.errors import InvalidInput

if TYPE_CHECKING:  # its library is loaded when the first answer of a given form is asked for
    from megatron_worker.sampler.grammars.grammar import Following, Grammar


@dataclass(frozen=True)
class End:
    """Why a completion ended. `stop_reason`: the stop token or string; None for the model's end token or the length."""

    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None


class Ending:
    """Finds the end of one completion, a token at a time, by vLLM's rules in vLLM's order."""

    def __init__(self, sampling: Sampling, end_ids: frozenset[int], tokenizer: Tokenizer) -> None:
        self._sampling = sampling
        self._end_ids = frozenset() if sampling.ignore_eos else end_ids
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._seen = ""
        self.cut: str | None = None  # the text up to the stop string that was found

    def end_behind(self, token_ids: list[int]) -> End | None:
        """Return the end if the completion ends with the last of these tokens."""
        last = token_ids[-1]
        found = self._found_string(last) if self._sampling.stop else None
        if last in self._end_ids:
            return End("stop")
        if last in self._sampling.stop_token_ids:
            return End("stop", last)
        if found is not None:
            return End("stop", found)
        return End("length") if len(token_ids) == self._sampling.max_tokens else None

    def text(self, token_ids: list[int]) -> str:
        """Return the text of a completion that has ended, without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True) if self.cut is None else self.cut

    def _found_string(self, token_id: int) -> str | None:
        """Return the stop string that begins first in the text. Only new text is searched."""
        start = len(self._seen)
        self._seen += self._stream.step(self._tokenizer, token_id) or ""
        places = [(self._seen.find(stop, max(0, start - len(stop) + 1)), stop) for stop in self._sampling.stop]
        found = sorted((place, stop) for place, stop in places if place >= 0)
        if not found:
            return None
        place, stop = found[0]
        self.cut = self._seen[:place]
        return stop


@dataclass(eq=False)
class Sequence:
    """One sample: its request and its drawn tokens. For each token there is a logprob, in nats, and in `drawn_by` the
    weights that drew it.

    `num_prompt_top`: the prompt is scored, and each of its tokens gets this many likeliest alternatives.
    `draws_nothing`: it ends with its prompt. `scalars`: a reward model's, at the prompt's last token. `tells_routes`:
    `routes` gets the experts of the prompt's tokens, then of each token that was computed, [tokens, layers, experts of
    a token]; a token's experts are those that drew the next one.
    `grammar`: constrains the sequence; `following`: its position in the grammar, once it has a slot.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    ending: Ending
    num_top: int = 0
    top_k: int = sys.maxsize
    min_p: float = 0.0
    penalties: Penalties = NO_PENALTIES
    grammar: "Grammar | None" = None
    following: "Following | None" = None
    num_prompt_top: int | None = None
    draws_nothing: bool = False
    tells_routes: bool = False
    prompt_scores: PromptScores | None = None
    scalars: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)
    drawn_by: list[DrawnBy] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    routes: list[NDArray[np.int16]] = field(default_factory=list)
    end: End | None = None

    @classmethod
    def scored(cls, prompt: tuple[int, ...], tokenizer: Tokenizer) -> Self:
        """Return a sequence that draws no token: a reward model scores its prompt."""
        return cls(prompt, Sampling(), 0, Ending(Sampling(), frozenset(), tokenizer), draws_nothing=True)

    @property
    def next_uniform(self) -> float:
        return uniform(self.seed, len(self.token_ids))

    @property
    def last_position(self) -> int:
        return len(self.prompt) + len(self.token_ids) - 1


class Ticket:
    """Sequences that were submitted together. `done` is set when all have ended.

    `num_changes`: the generator's when the adapter was looked up. `is_late`: the weights have changed since then, and
    nothing was drawn, or the weights that drew the tokens are lost. `problem`: why the request cannot be served.
    """

    def __init__(self, adapter: LoadedAdapter, sequences: list[Sequence], num_changes: int = 0) -> None:
        self.adapter = adapter
        self.sequences = sequences
        self.num_changes = num_changes
        self.done = threading.Event()
        self.cancelled = False
        self.is_late = False
        self.problem: InvalidInput | None = None
        self._num_open = len(sequences)

    @property
    def has_begun(self) -> bool:
        return any(sequence.token_ids for sequence in self.sequences)

    def one_ended(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self.done.set()

    def give_up(self, problem: InvalidInput) -> None:
        self.problem, self.cancelled = problem, True
        self.done.set()
