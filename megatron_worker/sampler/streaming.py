"""Pieces of a sequence that is still being drawn, for answers that are streamed."""

from dataclasses import dataclass

from tokenizers import Tokenizer

from megatron_worker.sampler.ending import End
from megatron_worker.sampler.generation import Sequence

_NO_CHARACTER = "\ufffd"  # the text of tokens that are a part of a character


@dataclass(frozen=True)
class Piece:
    """Tokens `first` up to `last`, exclusive, of a sequence, and their text. Only the last piece has an end."""

    first: int
    last: int
    text: str
    end: End | None

    @classmethod
    def whole(cls, sequence: Sequence) -> "Piece":
        """Return a sequence that has ended as one piece."""
        return cls(0, len(sequence.token_ids), sequence.ending.text(sequence.token_ids), sequence.end)


class Pieces:
    """Cuts a sequence into pieces while another thread draws it. Together they have its tokens and its text."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._num_held = max((len(stop) for stop in sequence.sampling.stop), default=1) - 1
        self._num_tokens = 0
        self._text = ""
        self._has_ended = False

    def next(self) -> Piece | None:
        """Return what is new; None if nothing is.

        Text that may change is held back: a character that is not complete, and what may begin a stop string.
        """
        end = self._sequence.end  # read first: all tokens were appended before it was set
        num_tokens = len(self._sequence.token_ids) if end else max(0, len(self._sequence.token_ids) - 1)
        if self._has_ended or (end is None and num_tokens == self._num_tokens):
            return None
        text = self._sequence.ending.text(self._sequence.token_ids) if end else self._settled(num_tokens)
        piece = Piece(self._num_tokens, num_tokens, text[len(self._text) :], end)
        self._num_tokens, self._text, self._has_ended = num_tokens, max(text, self._text, key=len), end is not None
        return piece

    def _settled(self, num_tokens: int) -> str:
        """Return the text of so many tokens, as far as no later token can change it."""
        text = self._tokenizer.decode(self._sequence.token_ids[:num_tokens], skip_special_tokens=True)
        return text[: len(text) - self._num_held].rstrip(_NO_CHARACTER)
