"""Asks a teacher behind a URL for log-probabilities: of its likeliest tokens, or of the dataset's own.

The server is OpenAI-compatible and sends `prompt_logprobs`, as vLLM's and Longshore's samplers do. Keys and addresses
are as for `score_model` graders.
"""

import math
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from activities.grading.open_grader import GraderMeans, ModelServer, NotGraded, answering
from activities.heartbeats import on_thread
from activities.host_context import OnHost
from activities.sandbox import calls as confined
from activities.sandbox.child import sign
from activities.sources.http import shown_uri
from longshore.fields import Artifact, Frozen
from shared.errors import InvalidInput
from shared.jobs.packed import LIKELIEST_IDS, LIKELIEST_LOGPROBS, PackedBin, Units
from shared.settings import Settings
from shared.storage.paths import content_key, taught

_AT_ONCE = 64  # units whose requests wait for threads
Told = tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]
"""One unit's ids and log-probabilities in nats, [N, K]."""


class TeacherRequest(Frozen):
    """Units, the model whose tokenizer made them, and the server to ask. `top_k`: 0 for the units' own ids alone.

    `key`: the name of the key that the server is sent. Only this host's settings have the key itself.
    """

    run_id: str
    units: Artifact
    model: Artifact
    vocab_size: int
    url: str
    name: str
    top_k: int = Field(ge=0)
    tenant: str = ""
    key: str | None = None


class AskTeacher(OnHost):
    """The activity `ask_teacher`."""

    @on_thread("ask_teacher")
    def ask_teacher(self, request: TeacherRequest) -> Artifact:
        """Write the teacher's answers for every target, once a run: the files of `PackedData.likeliest`.

        Raises:
            InvalidInput: the server refuses, may not be asked, sends no log-probabilities, or has another tokenizer; or
                this installation has no key of this name for it.
            StoreUnavailable: it cannot be reached, or is too busy.
        """
        means = _means(request, self._host.settings)

        def write(folder: Path) -> None:
            limits = self._host.settings.confined
            reads = self._host.stage(request.units), self._host.stage(request.model)
            asked, answer = (*reads, request, means.without_key), answering([request.url], means, "teacher")
            with closing(
                confined.stream(limits, told_by_teacher, *asked, kind="grading", answer=answer, reads=reads)
            ) as found:
                ids, logprobs = zip(*((ids, logprobs) for ids, logprobs in found if ids), strict=True)
            np.save(folder / LIKELIEST_IDS, np.concatenate([np.array(x, dtype="<i4") for x in ids]))
            np.save(folder / LIKELIEST_LOGPROBS, np.concatenate([np.array(x, dtype="<f4") for x in logprobs]))

        return self._host.made_once(taught(content_key("taught-1", request.model_dump_json())), "teacher", write)


def _means(request: TeacherRequest, settings: Settings) -> GraderMeans:
    """Return the means to ask: with a named key, which no server but its own gets, that is the operator's server."""
    means = GraderMeans.of(settings)
    if request.key is None:
        return means
    known = settings.grading.server_keys.get(request.key)
    is_known = known is not None and known.url.rstrip("/") == request.url.rstrip("/")
    if known is None or not is_known or (known.tenants and request.tenant not in known.tenants):
        rule = f"this installation has no key {request.key} for {shown_uri(request.url)} that you may name"
        raise InvalidInput(rule, "teacher_key")
    own = {"score_model_url": known.url, "score_model_key": known.key.get_secret_value()}
    return means.model_copy(update={"grading": means.grading.model_copy(update=own)})


def told_by_teacher(units: Path, model: Path, request: TeacherRequest, means: GraderMeans) -> Iterator[Told]:
    """Yield the teacher's answer for each unit. Raises as the activity does."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text_of = cache(lambda id: tokenizer.decode([id], skip_special_tokens=False))
    server = ModelServer(request.url, means.grading, means.allow_private_addresses, "teacher")

    with Units(units) as data:
        for first in range(0, data.header.num_units, _AT_ONCE):
            sign()
            numbers = range(first, min(first + _AT_ONCE, data.header.num_units))
            rows = [data.read_bin(np.array([number])) for number in numbers]
            last = [row.label_N[row.hidden_index_N == row.num_tokens - 1][:1] for row in rows]
            prompts = [np.concatenate([row.token_id_T, end]).tolist() for row, end in zip(rows, last, strict=True)]
            asked = {"model": request.name, "max_tokens": 1, "temperature": 0, "prompt_logprobs": request.top_k}
            answers = server.ask("/completions", [asked | {"prompt": ids} for ids in prompts])
            for row, ids, answer in zip(rows, prompts, answers, strict=True):
                if isinstance(answer, NotGraded):
                    raise InvalidInput(str(answer), "teacher")
                yield _told(answer, row, len(ids), request.top_k, text_of, request.vocab_size)


def _told(answer: Any, row: PackedBin, num_tokens: int, top_k: int, text_of: Any, vocab_size: int) -> Told:
    match answer:
        case {"choices": [{"prompt_logprobs": list(told)}]} if len(told) == num_tokens:
            pass
        case _:
            raise InvalidInput("the server does not send prompt_logprobs, one a token", "teacher")
    ids: list[tuple[int, ...]] = []
    logprobs: list[tuple[float, ...]] = []
    try:
        for index, label in zip(row.hidden_index_N.tolist(), row.label_N.tolist(), strict=True):
            known = {int(id): (float(one["logprob"]), one.get("decoded_token")) for id, one in told[index + 1].items()}
            named = sorted(known, key=lambda id: (-known[id][0], id))[:top_k] if top_k else [label]
            if len(named) < (top_k or 1) or not all(math.isfinite(known[id][0]) for id in named):
                raise InvalidInput(f"the server does not tell {top_k or 1} finite log-probabilities a token", "teacher")
            for id in named:
                theirs, ours = known[id][1], text_of(id) if 0 <= id < vocab_size else None
                # Ours is "" if the model has more ids than the tokenizer. Servers write parts of characters otherwise.
                if ours is None or (isinstance(theirs, str) and ours.isascii() and ours.strip() != theirs.strip()):
                    rule = f"its token {id} is {theirs!r}, the student's {ours!r}: both must have one tokenizer"
                    raise InvalidInput(rule, "teacher")
            ids.append(tuple(named))
            logprobs.append(tuple(known[id][0] for id in named))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(f"the server's prompt_logprobs are not vLLM's: {error!r}"[:300], "teacher") from error
    return tuple(ids), tuple(logprobs)
