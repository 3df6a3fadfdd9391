"""The header of a safetensors file: which tensors it holds, and whether the file is as long as it says."""

import math
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shared.errors import InvalidInput
from shared.field_rules import first_rule

_MAX_HEADER_BYTES = 8 << 20  # of some 70,000 tensors; parsed, each byte takes thirty
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


class TensorEntry(BaseModel):
    """One tensor: its dtype in safetensors' letters, shape, and first and last byte after the header."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int] = Field(description="bytes")

    @property
    def is_consistent(self) -> bool:
        start, end = self.data_offsets
        item_bytes = _ITEM_BYTES.get(self.dtype)
        if item_bytes is None or min(self.shape, default=0) < 0:
            return False
        return 0 <= start <= end and end - start == math.prod(self.shape) * item_bytes


_entries: TypeAdapter[dict[str, TensorEntry]] = TypeAdapter(dict[str, TensorEntry])


def read_header(read: Callable[[int, int], bytes], size: int, place: str) -> dict[str, TensorEntry]:
    """The tensors of a file by name, from its first bytes alone.

    Args:
        read: bytes of the file by first byte and number.
        size: of the whole file, in bytes.

    Raises:
        InvalidInput: no safetensors file, or a truncated one.
    """
    if size < 8:
        raise InvalidInput(f"no safetensors file: it has {size} bytes", place)
    header_bytes = int.from_bytes(read(0, 8), "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise InvalidInput("no safetensors file: its first bytes are not the size of a header", place)
    if header_bytes > size - 8:
        raise InvalidInput(f"truncated: a header of {header_bytes:,} bytes in a file of {size:,}", place)
    tensors = _parse(read(8, header_bytes), place)
    data_bytes = max((entry.data_offsets[1] for entry in tensors.values()), default=0)
    if data_bytes != size - 8 - header_bytes:
        expected = 8 + header_bytes + data_bytes
        raise InvalidInput(
            f"truncated or damaged: the header tells of {expected:,} bytes, the file has {size:,}", place
        )
    return tensors


def _parse(header: bytes, place: str) -> dict[str, TensorEntry]:
    try:
        tensors = TypeAdapter(dict[str, dict]).validate_json(header)
        tensors.pop("__metadata__", None)
        entries = _entries.validate_python(tensors)
    except ValidationError as error:
        raise InvalidInput(f"the safetensors header is damaged: {first_rule(error)}", place) from error
    for name, entry in entries.items():
        if not entry.is_consistent:
            raise InvalidInput(f"tensor {name} of dtype {entry.dtype} does not fit its place in the file", place)
    return entries
