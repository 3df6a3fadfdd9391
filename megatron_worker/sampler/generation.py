"""Generation: sequences in slots, a token of each a step, until each has ended.

One thread runs the loop and alone touches the device; others `submit` and wait. Sequences of one adapter share a lane
of slots; a slot that falls free is filled at once. A sequence's tokens depend on its prompt, its adapter, its seed and
its sampling settings, and on no other request (see decoder.py).

Shape suffixes: B slots, H hidden size, V vocabulary, K likeliest.
"""

import math
import queue
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from megatron_worker.lora import AppliedLora
from megatron_worker.sampler.adapters import LoadedAdapter
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.drawing import NO_PENALTIES, Cuts, Drawn, Penalties, PromptScores, draw, likeliest, uniform
from megatron_worker.sampler.layers import Factors, Prefilled
from megatron_worker.sampler.prefixes import KeptPrefixes
from shared.chat.completions import DrawnBy, Sampling
from shared.errors import InvalidInput

if TYPE_CHECKING:
    from megatron_worker.sampler.grammars.grammar import Grammar


# --- A sample while it is drawn, and its end ---
# At the model's end token, a stop token or string, or the length.


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
    `asking`: names who asks; nothing that was kept of another's prompts is used, as the answer tells it. `num_reused`:
    tokens of the prompt that were not computed again for it (prefixes.py).
    `ticket`: the sequences that were submitted together with it.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    ending: Ending
    asking: str = ""
    num_top: int = 0
    top_k: int = sys.maxsize
    min_p: float = 0.0
    penalties: Penalties = NO_PENALTIES
    grammar: "Grammar | None" = None
    following: "Grammar | None" = None
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
    num_reused: int = 0
    end: End | None = None
    ticket: "RequestGroup" = field(init=False)

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


class RequestGroup:
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
        for sequence in sequences:
            sequence.ticket = self

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


Shapes = tuple[tuple[str, torch.Size, torch.Size], ...]
"""Of an adapter's matrices beside each fused linear: [R, I] and [O, R]."""
_KEPT_PROMPTS = 4  # prompts whose keys and values a lane keeps while their samples wait for slots


@dataclass(frozen=True)
class Pause:
    """A call between two tokens, by the thread that generates.

    `continues`: running sequences continue with the weights that the call has changed; else the call waits until they
    have ended.
    """

    call: Callable[[], None]
    continues: bool = False
    done: Future[None] = field(default_factory=Future)

    def run(self) -> bool:
        """Make the call. Returns False if it failed."""
        try:
            self.call()
        except Exception as error:
            self.done.set_exception(error)
            return False
        self.done.set_result(None)
        return True


class Generator:
    """The generation loop. `run` ends after `stop`; an error in it is a bug, and ends the process.

    `num_changes` counts the changes of weights that have begun, except changes with `continues`. `prefixes`: what is
    kept of prompts, of all adapters, at most `kept_bytes`.
    """

    def __init__(self, decoder: Decoder, num_slots: int, kept_bytes: int = 0) -> None:
        self._decoder = decoder
        self.prefixes = KeptPrefixes(decoder, kept_bytes)
        self._num_slots = num_slots
        self._arrivals: queue.SimpleQueue[RequestGroup | Pause | None] = queue.SimpleQueue()
        self._pause: Pause | None = None
        self.num_changes = 0
        self._lanes: dict[LoadedAdapter, _AdapterBatch] = {}
        self._widths = dict[Shapes, int]()

    def submit(self, ticket: RequestGroup) -> None:
        self._arrivals.put(ticket)

    def change(self, call: Callable[[], None], continues: bool = False) -> None:
        """Call a function that changes weights. Running sequences end before it; later ones wait.

        Args:
            continues: running sequences continue after it, from what they have drawn so far. If it fails they are lost.

        Raises what the call raises.
        """
        pause = Pause(call, continues)
        self._arrivals.put(pause)
        pause.done.result()

    def stop(self) -> None:
        """End `run`. Safe to call from a signal handler."""
        self._arrivals.put(None)

    @torch.inference_mode()
    def run(self) -> None:
        while self._take():
            for adapter, lane in list(self._lanes.items()):
                lane.step()
                if lane.is_idle:
                    del self._lanes[adapter]

    def _take(self) -> bool:
        """Take what has arrived; wait for it when there is nothing else to do. Returns False to stop."""
        while not self._lanes or (self._pause is None and not self._arrivals.empty()):
            if self._pause is not None:
                self.num_changes += 1
                self._pause.run()
                self._pause = None
            match self._arrivals.get():
                case None:
                    return False
                case Pause(continues=True) as pause:
                    self._renew_lanes(pause)
                case Pause() as pause:
                    self._pause = pause
                case RequestGroup() as ticket if ticket.num_changes != self.num_changes:
                    ticket.is_late = True
                    ticket.done.set()
                case RequestGroup() as ticket:
                    self._lane(ticket.adapter).add(ticket)
        return True

    def _renew_lanes(self, pause: Pause) -> None:
        if pause.run():
            for lane in self._lanes.values():
                lane.renew()
            return
        self.num_changes += 1
        for lane in self._lanes.values():
            lane.give_up()
        self._lanes.clear()

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values of the running sequences, of their prompts, and of earlier ones that are kept."""
        return self.prefixes.num_bytes + sum(lane.cache_bytes for lane in list(self._lanes.values()))

    def _lane(self, adapter: LoadedAdapter) -> "_AdapterBatch":
        if adapter not in self._lanes:
            if (shapes := shapes_of(adapter.lora_weights)) not in self._widths:
                self._widths[shapes] = reliable_width(self._decoder, shapes, self._num_slots)
            self._lanes[adapter] = _AdapterBatch(self._decoder, adapter, self._widths[shapes], self.prefixes)
        return self._lanes[adapter]


class _AdapterBatch:
    """The slots that draw from one adapter."""

    def __init__(self, decoder: Decoder, adapter: LoadedAdapter, num_slots: int, prefixes: KeptPrefixes) -> None:
        self._decoder, self._prefixes = decoder, prefixes
        self._adapter = adapter
        self._drawn_by = adapter.drawn_by
        self._cache = decoder.new_cache(num_slots)
        self._hidden_BH = torch.zeros(
            num_slots, decoder.architecture.hidden_size, dtype=decoder.dtype, device=decoder.device
        )
        self._slots: list[Sequence | None] = [None] * num_slots
        self._waiting: deque[Sequence] = deque()
        self._prompts: OrderedDict[tuple[str, tuple[int, ...]], Prefilled] = OrderedDict()

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not any(self._slots)

    @property
    def cache_bytes(self) -> int:
        return self._cache.num_bytes + sum(prompt.num_bytes for prompt in list(self._prompts.values()))

    def add(self, ticket: RequestGroup) -> None:
        self._waiting.extend(ticket.sequences)

    @property
    def _lora(self) -> Factors:
        return self._adapter.lora_weights

    def renew(self) -> None:
        """Prefill each sequence again if the weights have changed, so that the new ones draw its next token."""
        if self._drawn_by == self._adapter.drawn_by:
            return
        self._drawn_by = self._adapter.drawn_by
        self._prompts.clear()
        for slot, sequence in enumerate(self._slots):
            if sequence is not None:
                read = self._read(sequence.asking, (*sequence.prompt, *sequence.token_ids))
                self._cache.fill(slot, read)
                self._hidden_BH[slot] = read.hidden_H

    def give_up(self) -> None:
        """Have all requests asked again: their weights are lost."""
        for sequence in (*self._slots, *self._waiting):
            if sequence is not None:
                sequence.ticket.is_late = True
                sequence.ticket.done.set()

    def step(self) -> None:
        """Fill free slots, draw a token in each, free those that ended, and compute the next logits of the others."""
        self._slots = [None if sequence and sequence.ticket.cancelled else sequence for sequence in self._slots]
        self._fill()
        self._draw()
        self._forward()

    def _fill(self) -> None:
        for slot, sequence in enumerate(self._slots):
            if sequence is None and (arrival := self._next_waiting()) is not None:
                prompt = self._prefilled(arrival)
                self._cache.fill(slot, prompt)
                self._hidden_BH[slot] = prompt.hidden_H
                if arrival.tells_routes:
                    arrival.routes.append(_together(prompt.experts))
                if arrival.grammar is not None:
                    arrival.following = arrival.grammar.begin()
                self._slots[slot] = arrival

    def _next_waiting(self) -> Sequence | None:
        """Return the next sequence that draws tokens. Prompts are scored here, and some are only scored."""
        while self._waiting:
            sequence = self._waiting.popleft()
            if sequence.ticket.cancelled:
                continue
            if sequence.num_prompt_top is not None:
                prompt = self._prefilled(sequence)
                sequence.prompt_scores = self._decoder.score(sequence.prompt, prompt, sequence.num_prompt_top)
            if self._adapter.head is not None:
                hidden_1H = self._prefilled(sequence).hidden_H[None]
                sequence.scalars = self._adapter.head.values(hidden_1H)[0].tolist()
            if not sequence.draws_nothing:
                return sequence
            sequence.end = End("length")
            sequence.ticket.one_ended()
        return None

    def _prefilled(self, sequence: Sequence) -> Prefilled:
        """Return a sequence's prompt as it was read; if it is to be scored, with the residual stream of all tokens."""
        prompt, is_scored = (sequence.asking, sequence.prompt), sequence.num_prompt_top is not None
        read = self._prompts.get(prompt)
        if read is None or (is_scored and read.num_reused):
            self._prompts[prompt] = read = self._read(*prompt, is_whole=is_scored)
            if len(self._prompts) > _KEPT_PROMPTS:
                self._prompts.popitem(last=False)
        sequence.num_reused = read.num_reused
        return read

    def _read(self, asking: str, token_ids: tuple[int, ...], is_whole: bool = False) -> Prefilled:
        owner = self._adapter.weights, asking
        return self._prefixes.prefill(owner, token_ids, self._lora, is_whole=is_whole)

    def _draw(self) -> None:
        if not any(self._slots):
            return
        logit_BV = self._decoder.logits(self._hidden_BH, self._lora)
        self._forbid(logit_BV)
        taken = [(slot, sequence) for slot, sequence in enumerate(self._slots) if sequence is not None]
        drawn = self._drawn(logit_BV)
        tokens, raw, processed = drawn.token_B.tolist(), drawn.raw_B.tolist(), drawn.processed_B.tolist()
        for slot, sequence in taken:
            sequence.token_ids.append(tokens[slot])
            sequence.raw.append(raw[slot])
            sequence.processed.append(processed[slot])
            sequence.drawn_by.append(self._drawn_by)
            if sequence.num_top:
                sequence.top += likeliest(drawn.raw_BV[slot : slot + 1], sequence.num_top)
            sequence.end = sequence.ending.end_behind(sequence.token_ids)
            if sequence.end is not None:
                self._slots[slot] = None
                sequence.ticket.one_ended()
            elif sequence.following is not None:
                sequence.following.accept(tokens[slot])

    def _forbid(self, logit_BV: torch.Tensor) -> None:
        """Make what grammars do not allow impossible, in place. Gives up whose grammar cannot be followed further."""
        for slot, sequence in enumerate(self._slots):
            if sequence is None or sequence.following is None:
                continue
            try:
                allowed_V = sequence.following.allowed()
            except InvalidInput as problem:
                sequence.ticket.give_up(problem)
                self._slots[slot] = None
            else:
                logit_BV[slot].masked_fill_(~allowed_V.to(logit_BV.device), -torch.inf)

    def _drawn(self, logit_BV: torch.Tensor) -> Drawn:
        """Draw a token in every slot; in empty ones too, greedily, so that shapes do not change."""
        temperature, top_p, top_k, min_p, numbers = zip(*map(_drawing, self._slots), strict=True)
        device, most = self._decoder.device, logit_BV.shape[1]
        return draw(
            logit_BV,
            torch.tensor(temperature, device=device),
            Cuts(
                min_p_B=torch.tensor(min_p, device=device),
                top_k_B=torch.tensor([min(k, most) for k in top_k], device=device),
                top_p_B=torch.tensor(top_p, device=device),
            ),
            torch.tensor(numbers, dtype=torch.float64, device=device),
            self._penalised(logit_BV),
        )

    def _penalised(self, logit_BV: torch.Tensor) -> torch.Tensor | None:
        asked = {i: s for i, s in enumerate(self._slots) if s and s.penalties.change_anything}
        if not asked:
            return None
        penalised_BV = logit_BV.clone()
        for slot, sequence in asked.items():
            sequence.penalties.add_to(penalised_BV[slot], sequence.token_ids)
        return penalised_BV

    def _forward(self) -> None:
        last = [(s.token_ids[-1], s.last_position) if s else (0, 0) for s in self._slots]
        if not any(self._slots):
            return
        token_B, position_B = (torch.tensor(values, device=self._decoder.device) for values in zip(*last, strict=True))
        chosen = list[torch.Tensor]()
        self._hidden_BH = self._decoder.step(token_B, position_B, self._cache, self._lora, chosen)
        if any(sequence is not None and sequence.tells_routes for sequence in self._slots):
            route_BLK = _together(chosen)
            for slot, sequence in enumerate(self._slots):
                if sequence is not None and sequence.tells_routes:
                    sequence.routes.append(route_BLK[slot : slot + 1])


def _together(chosen: list[torch.Tensor]) -> NDArray[np.int16]:
    """Return the experts of all layers, [B, layers, experts of a token]."""
    experts: NDArray[np.int16] = torch.stack(chosen, dim=1).short().cpu().numpy()
    return experts


def _drawing(sequence: Sequence | None) -> tuple[float, float, int, float, float]:
    """Return temperature, top_p, top_k, min_p and the number that draws a slot's next token."""
    if sequence is None:
        return 0.0, 1.0, sys.maxsize, 0.0, 0.0
    sampling = sequence.sampling
    return sampling.temperature, sampling.top_p, sequence.top_k, sequence.min_p, sequence.next_uniform


def shapes_of(lora_weights: Factors) -> Shapes:
    return tuple((name, each.a_RI.shape, each.b_OR.shape) for name, each in sorted(lora_weights.items()))


@torch.inference_mode()
def reliable_width(decoder: Decoder, shapes: Shapes, num_slots: int) -> int:
    """Return the largest of num_slots, num_slots / 2, …, 1 whose slots compute the same bits from the same tokens.

    How a sum is computed depends on shapes, not on values. So an adapter of random values is tried: one that begins,
    whose second matrices are zeros, would hide differences that its later versions have.
    """
    lora_weights = _random_weights(decoder, shapes)
    while num_slots > 1 and not _slots_are_equal(decoder, lora_weights, num_slots):
        num_slots //= 2
    return num_slots


def _random_weights(decoder: Decoder, shapes: Shapes) -> Factors:
    """Return an adapter that adds to each linear about as much as an input of that size has."""
    device, dtype = decoder.device, decoder.dtype
    drawn = torch.Generator(device).manual_seed(0)

    def matrix(shape: torch.Size) -> torch.Tensor:
        return (torch.randn(shape, generator=drawn, device=device) / math.sqrt(shape[1])).to(dtype)

    return {name: AppliedLora(matrix(a_shape), matrix(b_shape), 1.0) for name, a_shape, b_shape in shapes}


def _slots_are_equal(decoder: Decoder, lora_weights: Factors, num_slots: int) -> bool:
    """Compare two tokens in all slots, then in slots at either end and in the middle, among others."""
    other = torch.arange(num_slots, device=decoder.device) % decoder.architecture.vocab_size
    alike = _two_tokens(decoder, lora_weights, torch.full_like(other, 1))
    if not all(torch.equal(row, alike[0]) for row in alike):
        return False
    for slot in {0, num_slots // 2, num_slots - 1}:
        mixed = other.clone()
        mixed[slot] = 1
        if not torch.equal(_two_tokens(decoder, lora_weights, mixed)[slot], alike[0]):
            return False
    return True


def _two_tokens(decoder: Decoder, lora_weights: Factors, token_B: torch.Tensor) -> torch.Tensor:
    cache = decoder.new_cache(len(token_B))
    for position in range(2):
        hidden_BH = decoder.step(token_B, torch.full_like(token_B, position), cache, lora_weights)
    return decoder.logits(hidden_BH, lora_weights)
