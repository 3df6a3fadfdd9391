"""Prompts as files: a row a line of JSON, and where each line begins, so that any row is read without the others."""

import json
from array import array
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from shared.errors import InvalidInput

ROWS, OFFSETS = "prompts.jsonl", "offsets.npy"


@dataclass(frozen=True, slots=True)
class PromptRow:
    """What the model is asked, as token ids; the dataset's row, which graders see as the item; where that stands."""

    place: str
    token_ids: tuple[int, ...]
    item: dict[str, Any]


class PromptsWriter:
    """Writes `prompts.jsonl` and `offsets.npy` (int64 [rows + 1], bytes) into a folder. Not sealed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = (folder / ROWS).open("wb")
        self._offsets = array("q", [0])

    def append(self, row: PromptRow) -> None:
        fields = {"place": row.place, "token_ids": row.token_ids, "item": row.item}
        try:
            text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except ValueError as error:
            raise InvalidInput(
                "the row holds a number beyond what JSON readers agree on (about 1.8e308)", row.place
            ) from error
        line = text.encode() + b"\n"
        self._file.write(line)
        self._offsets.append(self._offsets[-1] + len(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is None:
            np.save(self._folder / OFFSETS, np.frombuffer(self._offsets, dtype=np.int64))


class PromptsFile:
    """The rows of a folder that PromptsWriter wrote, by number."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / ROWS).open("rb")
        self._offsets = np.load(folder / OFFSETS, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> PromptRow:
        """Rows count from 0. Not for several threads at once."""
        start, end = (int(at) for at in self._offsets[number : number + 2])
        self._file.seek(start)
        fields = json.loads(self._file.read(end - start))
        return PromptRow(fields["place"], tuple(fields["token_ids"]), fields["item"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
