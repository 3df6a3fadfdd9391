"""Human-readable inspection of a model's folder: computed parts, memory of each layout, and refusals.

It trains nothing, and needs no host, worker or store.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import Field

from activities.formats.rows import Chat
from activities.host_context import HostContext
from activities.models.gguf_file import convert_gguf
from activities.models.resolve import (
    HUB_PATTERNS,
    check_chat_template,
    check_contents,
    check_tokenizer,
    gguf_file,
    read_config,
)
from activities.sources.models import locate, located
from activities.tokenizing.tokenizer import ModelTokenizer, TemplateProcess, TokenizerFiles
from longshore.fields import Frozen
from longshore.training import Layout, Linear, Lora
from shared.errors import InvalidInput
from shared.families.model_slices import shape_of
from shared.models.shape import ITEM_BYTES, Laid, LayoutBytes, ModelShape, layout_bytes
from shared.settings import DownloadSettings, Settings
from shared.storage.artifacts import manifest_of
from shared.storage.store import LocalStore

_RANKS = (2, 4, 8)
_TOOL = {"type": "function", "function": {"name": "tide", "description": "Tells tides.", "parameters": {}}}
_CALL = {"id": "callnr001", "type": "function", "function": {"name": "tide", "arguments": {"port": "Kiel"}}}
_ASK, _ANSWER = {"role": "user", "content": "When is it?"}, {"role": "assistant", "content": "At six."}
_PROBES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "tools": ([_ASK, _ANSWER], [_TOOL]),
    "tool calls": ([_ASK, {"role": "assistant", "tool_calls": [_CALL]}], None),
    "thoughts": ([_ASK, _ANSWER | {"reasoning_content": "The moon."}], None),
    "several turns": ([_ASK, _ANSWER, _ASK, _ANSWER], None),
}


class ModelLook(Frozen):
    """The findings about a model's folder.

    `targets`: the number of linears of each name that an adapter can target. `conversations`: for each kind of row,
    None, or why the chat template refuses it. `unlike_prompts`: the kinds of rows whose answers are trained after
    another text than the prompt that asks for them. `problems`: why a run would be refused, each with file and rule.
    """

    folder: str
    shape: ModelShape | None = None
    num_parameters: int = 0
    targets: dict[Linear, int] = Field(default_factory=dict)
    stops: tuple[str, ...] = ()
    conversations: dict[str, str | None] = Field(default_factory=dict)
    unlike_prompts: tuple[str, ...] = ()
    layouts: tuple[LayoutBytes, ...] = ()
    problems: tuple[str, ...] = ()


def look_at(folder: Path, lora: Lora, dtype: str = "bfloat16", read_all: bool = False) -> ModelLook:
    """Look at a folder of this machine.

    Args:
        lora: the adapter whose memory is estimated.
        dtype: of the weights: bfloat16 or float32.
        read_all: read all weights, and look for numbers that are not finite.

    Raises:
        InvalidInput: there is no such folder.
    """
    with TemporaryDirectory() as root:
        host = HostContext(Settings(root=Path(root), download=DownloadSettings(file_roots=(Path("/"),))))
        location = locate(str(folder.resolve()), "default", host.settings, HUB_PATTERNS, lambda _: None)
        problems = list[str]()
        found: dict[str, Any] = {"folder": str(folder)}
        with _noted(problems):
            if (name := gguf_file(location)) is not None:
                made = Path(root) / "model"
                made.mkdir()
                asked = str(folder / name), location.place(name), str(made)
                host.confined(convert_gguf, *asked, kind="dataset", reads=[folder / name], writes=[made])
                folder, location = made, located(LocalStore(made), manifest_of(made))
            config = read_config(location)
            shape = shape_of(config)
            counts = {linear: shape.num_linears((linear,)) for linear in shape.linears}
            found |= {"shape": shape, "targets": {linear: num for linear, num in counts.items() if num}}
            with _noted(problems):
                check_tokenizer(location, config.vocab_size, host)
                check_chat_template(location)
                found |= _chats(TokenizerFiles(folder=folder, place=location.store.uri).load())
            with _noted(problems):
                own = {s.name: s.shape for s in check_contents(location, config, read_all).slices}
                rows = (layout_bytes(own, ITEM_BYTES[dtype], shape, lora, laid) for laid in _layouts(shape))
                found |= {"num_parameters": sum(map(math.prod, own.values())), "layouts": tuple(rows)}
        return ModelLook(**found, problems=tuple(problems))


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """Note an InvalidInput instead of raising it."""
    try:
        yield
    except InvalidInput as error:
        problems.append(str(error))


def _chats(tokenizer: ModelTokenizer) -> dict[str, Any]:
    """Try the chat template on each kind of row."""
    assert tokenizer.template is not None
    refused, unlike = dict[str, str | None](), list[str]()
    with TemplateProcess(tokenizer.template, tokenizer.place) as process:
        for name, (messages, tools) in _PROBES.items():
            problems: list[str] = []
            with _noted(problems):
                weights = [float(message["role"] == "assistant") for message in messages]
                [row] = process.spans([Chat("", messages, tools, weights)])
                unlike += [name] * (row.unlike_prompts > 0)
            refused[name] = next(iter(problems), None)
        return {"stops": process.stops, "conversations": refused, "unlike_prompts": tuple(unlike)}


def _layouts(shape: ModelShape) -> Iterator[Laid]:
    """Yield one rank, and each dimension alone over 2, 4 and 8."""
    yield "megatron", Layout()
    for num in _RANKS:
        yield "megatron", Layout(tp=num, sp=shape.num_experts > 0)
        yield "megatron", Layout(pp=num)
        if shape.num_experts:
            yield "megatron", Layout(ep=num, dp=num)
        yield "megatron", Layout(dp=num)
    yield from (("fsdp", Layout(dp=num)) for num in _RANKS)
