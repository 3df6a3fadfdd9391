"""States of earlier prompts, kept for those that begin with the same tokens, as a conversation's next turn does.

A block's bits depend on the tokens up to its end alone (`PromptPass`). So a kept block has the bits that it would have
if it were computed again, and no result tells whether it was kept.

Keys and values of every block are kept, as a tree: a block is found by the one before it and its tokens. A recurrent
state is as large as many blocks, so it is kept only in two places: behind the last whole block of a prompt, and behind
the last block that two prompts share.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.layers import PROMPT_BLOCK, Factors, Prefilled, PromptPass, States


@dataclass(frozen=True, eq=False)
class Kept:
    """The states of a block and the experts of its tokens; or the recurrent states behind a block."""

    states: list[States]
    experts: list[Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.experts, *chain(*self.states)))


Key = tuple[object, tuple[int, ...]]
"""Of a block: the block before it, or the owner, and its tokens. Of recurrent states: the block before, no tokens."""


class KeptPrefixes:
    """The prefixes of prompts. Between two prompts they have at most `max_bytes`: the longest unused goes first.

    Attributes:
        num_computed, num_reused: tokens of all prompts that were read.
    """

    def __init__(self, decoder: Decoder, max_bytes: int) -> None:
        self._decoder, self._max_bytes = decoder, max_bytes
        self._kept: OrderedDict[Key, Kept] = OrderedDict()
        self.num_bytes = self.num_computed = self.num_reused = 0

    def forget(self) -> None:
        """Drop everything: the model's weights change, or their memory is wanted."""
        self._kept.clear()
        self.num_bytes = 0

    def prefill(
        self, owner: object, token_ids: Sequence[int], lora_weights: Factors, *, is_whole: bool = False
    ) -> Prefilled:
        """Read a prompt, from where a kept prefix of it ends. Its last token is always computed.

        Args:
            owner: the adapter's weights, and who asks: nothing that was kept for another owner is used.
            is_whole: compute all tokens, so that `stream_TH` has all of them.
        """
        run = self._decoder.new_pass(len(token_ids), lora_weights)
        ends = range(PROMPT_BLOCK, len(token_ids) + 1, PROMPT_BLOCK) if self._max_bytes else ()
        blocks = [tuple(token_ids[end - PROMPT_BLOCK : end]) for end in ends]
        most = 0 if is_whole else (len(token_ids) - 1) // PROMPT_BLOCK
        self._enter(run, self._path(owner, blocks), most, len(blocks))
        read = self._decoder.prefill(token_ids, lora_weights, run)
        self.num_computed += len(read.stream_TH)
        self.num_reused += read.num_reused
        self._keep(run, owner, blocks)
        return read

    def _path(self, owner: object, blocks: list[tuple[int, ...]]) -> list[Kept]:
        """Return the first blocks of a prompt, as far as they are kept."""
        path, before = list[Kept](), owner
        for block in blocks:
            if (found := self._kept.get((before, block))) is None:
                break
            path.append(before := found)
        return path

    def _enter(self, run: PromptPass, path: list[Kept], most: int, num_blocks: int) -> None:
        """Give a pass at most `most` blocks, and have it remember the recurrent states that will be kept."""
        num_taken = min(len(path), most)
        if run.is_recurrent:
            run.recurrent_at = {num * PROMPT_BLOCK: [] for num in (num_taken, num_blocks)}
            while num_taken and (path[num_taken - 1], ()) not in self._kept:
                num_taken -= 1
        for kept in path[:num_taken]:
            run.take_block(kept.states, kept.experts)
        if run.is_recurrent and num_taken:
            key = path[num_taken - 1], ()
            run.take_recurrent(self._kept[key].states)
            self._kept.move_to_end(key)

    def _keep(self, run: PromptPass, owner: object, blocks: list[tuple[int, ...]]) -> None:
        """Keep a prompt's blocks, and let go what was used the longest ago: of a prompt the last blocks first."""
        before, keys = owner, list[Key]()
        for number, block in enumerate(blocks):
            keys.append((before, block))
            if keys[-1] not in self._kept:
                self._add(keys[-1], Kept(run.block(number), run.experts[number]))
            before = self._kept[keys[-1]]
            states = run.recurrent_at.get((number + 1) * PROMPT_BLOCK)
            if states and (before, ()) not in self._kept:
                self._add((before, ()), Kept(states, []))
        for key in reversed(keys):
            self._kept.move_to_end(key)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def _add(self, key: Key, kept: Kept) -> None:
        self._kept[key] = kept
        self.num_bytes += kept.num_bytes
