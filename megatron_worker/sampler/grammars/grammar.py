"""Grammars of answers: compiled once a request, followed token by token in each of its sequences.

Every sequence is followed by itself: what a grammar allows depends on the tokens of that sequence alone.

Shape suffixes: V vocabulary.
"""

import json
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from pydantic import JsonValue
from tokenizers import Tokenizer
from torch import Tensor

from megatron_worker.sampler.grammars import trial
from shared.chat.completions import StructuredOutputs, Tags
from shared.errors import InvalidInput

PLACE = "structured_outputs"
_AT, _MESSAGE_CHARACTERS = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?"), 400
_EXCERPT = re.compile(r"^ *\d+ \| ", re.MULTILINE)
_ASCII = "\t\n\r" + "".join(map(chr, range(0x20, 0x7F)))
_TRIAL_TIMEOUT_S, _KEPT_VERDICTS = 60.0, 1024
# White space between JSON's tokens, bounded: an untrained model would write it for ever.
_OPTIONS: dict[str, JsonValue] = {"whitespace_pattern": r"[ \n\r\t]{1,64}", "lenient": False}


class Grammar:
    """A compiled grammar at its beginning, or at one sequence's place in it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def begin(self) -> "Grammar":
        """Return the grammar at its beginning, to follow one sequence."""
        return Grammar(self._matcher.deep_copy(), self._vocab_size)

    def allowed(self) -> Tensor:
        """Return the tokens that may come next, [V] booleans; at least one.

        Raises InvalidInput: following the grammar takes more work than allowed, or no token of the vocabulary fits.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed_V = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab_size]).bool()
        if self._matcher.is_error():
            raise InvalidInput(
                f"the answer's form cannot be followed further: {_in_short(self._matcher.get_error())}", PLACE
            )
        if not allowed_V.any():
            raise InvalidInput("no token of the model's vocabulary goes on with the answer's form", PLACE)
        return allowed_V

    def accept(self, token_id: int) -> None:
        """Go on behind a token that is allowed."""
        self._matcher.consume_token(token_id)


class Grammars:
    """Compiles grammars for one model's tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> None:
        try:
            self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=sorted(end_ids))
        except ValueError as error:
            raise InvalidInput(f"answers of this model's tokenizer cannot be given a form: {error}", PLACE) from error
        # llguidance skips a byte that has no token.
        if self._tokenizer.decode_bytes(self._tokenizer.greedy_tokenize(_ASCII)) != _ASCII.encode():
            raise InvalidInput("the model's vocabulary cannot write every character of JSON", PLACE)
        self._vocab_size = vocab_size
        self._trying: dict[str, tuple[threading.Lock, int]] = {}
        self._verdicts: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def compiled(self, wanted: StructuredOutputs, asking: str = "") -> Grammar:
        """Compile the constraint on an answer.

        `asking`: the requester. Each requester's grammars are tried one after another, so that nobody waits for others.

        Raises InvalidInput: it is malformed, has keywords that are not supported, or takes too much to compile.
        """
        grammar = grammar_of(wanted)
        if problem := self._verdict(grammar, asking):
            raise InvalidInput(problem, PLACE)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=trial.LIMITS)
        if matcher.is_error():
            raise InvalidInput(_in_short(matcher.get_error()), PLACE)
        return Grammar(matcher, self._vocab_size)

    def _verdict(self, grammar: str, asking: str) -> str:
        """Return what is wrong with a grammar, if anything. Each grammar is tried once."""
        with self._lock:
            known = self._verdicts.get(grammar)
        if known is None:
            with self._turn(asking):
                known = tried(grammar)
            with self._lock:
                self._verdicts[grammar] = known
                if len(self._verdicts) > _KEPT_VERDICTS:
                    self._verdicts.popitem(last=False)
        return known

    @contextmanager
    def _turn(self, asking: str) -> Iterator[None]:
        """Wait until no other grammar of the same requester is being tried."""
        with self._lock:
            turn, num_waiting = self._trying.get(asking, (threading.Lock(), 0))
            self._trying[asking] = turn, num_waiting + 1
        try:
            with turn:
                yield
        finally:
            with self._lock:
                turn, num_waiting = self._trying.pop(asking)
                if num_waiting > 1:
                    self._trying[asking] = turn, num_waiting - 1


def tried(grammar: str) -> str:
    """Compile a grammar in a separate process. Returns what is wrong with it, or an empty string."""
    command = [sys.executable, "-I", str(Path(trial.__file__))]
    try:
        done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=_TRIAL_TIMEOUT_S, env={})
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode not in (0, trial.REFUSED):
        memory = trial.MEMORY_BYTES >> 20
        return f"it takes too much to compile (beyond {trial.CPU_S} s, {memory:,} MiB, or references nested too deep)"
    return _in_short(done.stdout.decode(errors="replace"))


def grammar_of(wanted: StructuredOutputs) -> str:
    """Return a grammar in llguidance's language."""
    if wanted.structural_tag is not None:
        return _tags(wanted.tags())
    return f"start: %json {_schema(wanted.json_ or {'type': 'object'})}"


def _tags(tags: Tags) -> str:
    more = "" if tags.stop_after_first else f" ({_text(tags.separator)} tag)*"
    names = [f"tag_{number}" for number in range(len(tags.tags))]
    rules = [f"start: tag{more}", f"tag: {' | '.join(names)}"]
    for name, tag in zip(names, tags.tags, strict=True):
        rules += [
            f"{name}: {_text(tag.begin)} json_{name} {_text(tag.end)}",
            f"json_{name}: %json {_schema(tag.content.json_schema)}",
        ]
    return "\n".join(rules)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(schema: dict[str, JsonValue]) -> str:
    return json.dumps(schema | {"x-guidance": _OPTIONS})


def _in_short(problem: str) -> str:
    """Return llguidance's message on one line, without the position in the grammar text, which users do not see."""
    message = _EXCERPT.split(_AT.sub("", problem))[0].replace("<non-verbose/>", "")
    return " ".join(message.split())[:_MESSAGE_CHARACTERS]
