"""Chat messages to token ids, request by request: tokenizers and the processes of chat templates stay open between."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from activities.confined import calls as confined
from activities.formats.examples import Question
from activities.formats.rows import Row, message_of
from activities.host_context import HostContext
from activities.tokenizing.render_prompts import ids_before_answers
from activities.tokenizing.template_process import TemplateProcess
from activities.tokenizing.tokenizer import ModelTokenizer, check_characters, check_loading, tokenizer_files
from activities.tokenizing.tool_calls import with_parsed_calls
from shared.contract import Artifact
from shared.errors import InvalidInput

_MAX_OPEN = 4  # models
_MAX_MEMORY_BYTES = 2 << 30  # for which a tokenizer may be loaded
_PLACE = "messages"


class ChatPrompts:
    """Render conversations to the ids that training on the same conversation has before the answer.

    Safe to use from several threads, which render one at a time.
    """

    def __init__(self, host: HostContext, render_limit_s: float = 5.0) -> None:
        confinement = host.settings.confined
        limit = min(confinement.memory_bytes, _MAX_MEMORY_BYTES)
        self._limits = confinement.model_copy(update={"memory_bytes": limit})
        self._host = host
        self._render_limit_s = render_limit_s
        self._lock = threading.Lock()
        self._tokenizers: OrderedDict[str, ModelTokenizer] = OrderedDict()
        self._templates: dict[str, TemplateProcess] = {}

    def tokenizer(self, model: Artifact) -> ModelTokenizer:
        """Raises InvalidInput for a model without one, CorruptArtifact for files that have changed."""
        with self._lock:
            return self._tokenizer(model)

    def ids(
        self, model: Artifact, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Raises InvalidInput for messages that are none, that the model's template refuses, or for want of one."""
        check_characters(json.dumps([messages, tools], ensure_ascii=False), _PLACE)
        row = Row(_PLACE, {})
        checked = [_as_text(message_of(row, f"messages[{i}]", message)) for i, message in enumerate(messages)]
        question = Question(_PLACE, [with_parsed_calls(message) for message in checked], list(tools) or None, {})
        with self._lock:
            tokenizer = self._tokenizer(model)
            text = self._rendered(model, tokenizer, question)
        check_characters(text, _PLACE)  # templates may make much of little
        return tuple(next(ids_before_answers([text], tokenizer)))

    def close(self) -> None:
        with self._lock:
            for sha256 in list(self._templates):
                self._forget(sha256)

    def _tokenizer(self, model: Artifact) -> ModelTokenizer:
        if model.sha256 not in self._tokenizers:
            files = tokenizer_files(self._host, model)
            confined.call(self._limits, check_loading, files)  # what aborts its process must not abort this one
            self._tokenizers[model.sha256] = files.load()
            if len(self._tokenizers) > _MAX_OPEN:
                self._forget(self._tokenizers.popitem(last=False)[0])
        self._tokenizers.move_to_end(model.sha256)
        return self._tokenizers[model.sha256]

    def _rendered(self, model: Artifact, tokenizer: ModelTokenizer, question: Question) -> str:
        if tokenizer.template is None:
            raise InvalidInput("the model has no chat template: ask it for completions of a text", "model")
        try:
            if model.sha256 not in self._templates:
                process = TemplateProcess(tokenizer.template, tokenizer.place, self._render_limit_s)
                self._templates[model.sha256] = process
            return self._templates[model.sha256].asked([question])[0]
        except BaseException:  # also a cancellation, which may leave an answer unread: the next one starts afresh
            self._forget(model.sha256)
            raise

    def _forget(self, sha256: str) -> None:
        if (process := self._templates.pop(sha256, None)) is not None:
            with suppress(OSError):
                process.close()


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Clients send a text in parts, which most templates do not know."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": "".join(part["text"] for part in content)}
