"""The end of a completion: at the model's end token, a stop token or string, or the length."""

from dataclasses import dataclass
from typing import Literal

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from shared.chat.completions import Sampling


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

    def after(self, token_ids: list[int]) -> End | None:
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
