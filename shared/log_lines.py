"""Formats of log lines. Control characters are escaped, so that no user's text can look like another line, move a
terminal's cursor or hide text."""

import io
import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

Ids = Callable[[], dict[str, str]]

_CONTROLS = (*range(32), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_NAMED = {9: r"\t", 10: r"\n", 13: r"\r"}
_ESCAPES = {code: _NAMED.get(code, rf"\x{code:02x}" if code < 256 else rf"\u{code:04x}") for code in _CONTROLS}
_OF_LINES = {code: escape for code, escape in _ESCAPES.items() if code not in (9, 10)}


def escaped(text: str) -> str:
    """Return a text as one line, with its control characters escaped."""
    return text.translate(_ESCAPES)


class EscapingFormatter(logging.Formatter):
    """Formats a message as one line. The lines of a traceback are indented, since an error's text may have lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"  {line.translate(_OF_LINES)}" for line in text.split("\n"))


class JsonFormatter(logging.Formatter):
    """Formats a message as one line of JSON, with the ids of the work in progress."""

    def __init__(self, ids: Ids) -> None:
        super().__init__()
        self._ids = ids

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._ids(),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found).replace("\x7f", r"\u007f")  # JSON's own escapes leave that one out


class EscapingStream(io.TextIOWrapper):
    """A stream that escapes control characters, except tabs and line ends."""

    def write(self, text: str, /) -> int:
        super().write(text.translate(_OF_LINES))
        return len(text)


def escape_output() -> None:
    """Escape control characters in this process's output and logs from now on. Called once, when a process starts."""
    sys.stdout, sys.stderr = (
        EscapingStream(stream.detach(), encoding="utf-8", errors="backslashreplace", line_buffering=True)
        for stream in (sys.stdout, sys.stderr)
        if isinstance(stream, io.TextIOWrapper)
    )


def start_logging(form: Literal["text", "json"] = "text", ids: Ids = dict) -> None:
    """Log from INFO on to stderr, one line per message. `ids`: the ids of the work in progress, for lines of JSON."""
    handler = logging.StreamHandler()
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(JsonFormatter(ids) if form == "json" else EscapingFormatter(text))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each request to a host
