"""A look at a model's folder, for people: what would be computed, what each layout wants, what is refused.

It trains nothing, and needs no host, worker or store.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import Field

from activities.formats.examples import Chat
from activities.host_context import HostContext
from activities.models.files import HUB_PATTERNS, Weights, check_chat_template, check_tokenizer, read_config
from activities.models.resolve import check_contents
from activities.sources.models import Location, locate
from activities.tokenizing.template_process import TemplateProcess
from activities.tokenizing.tokenizer import ModelTokenizer, TokenizerFiles
from longshore.fields import Frozen
from longshore.layout import EngineName, Layout
from longshore.training import LINEARS, Linear, Lora
from shared.errors import InvalidInput
from shared.models.config import DenseConfig
from shared.models.memory import rank_bytes
from shared.models.shape import ModelShape, check_family, check_layout, shape_of
from shared.settings import DownloadSettings, Settings

_RANKS = (2, 4, 8)
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}
_TOOL = {"type": "function", "function": {"name": "tide", "description": "Tells tides.", "parameters": {}}}
_CALL = {"id": "callnr001", "type": "function", "function": {"name": "tide", "arguments": {"port": "Kiel"}}}
_ASK, _ANSWER = {"role": "user", "content": "When is it?"}, {"role": "assistant", "content": "At six."}
_PROBES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "tools": ([_ASK, _ANSWER], [_TOOL]),
    "tool calls": ([_ASK, {"role": "assistant", "tool_calls": [_CALL]}], None),
    "thoughts": ([_ASK, _ANSWER | {"reasoning_content": "The moon."}], None),
}


class LayoutBytes(Frozen):
    """A layout, and about the bytes of the rank that holds the most; or why it is refused."""

    engine: EngineName
    layout: str
    ranks: int
    base_bytes: int = 0
    lora_bytes: int = 0
    full_bytes: int = 0
    refused: str | None = None


class ModelLook(Frozen):
    """What is known of a folder.

    `targets`: how many linears of each name an adapter can be beside. `conversations`: for what rows may hold, None, or
    why the chat template refuses it. `problems`: why a run would be refused, each with its file and rule.
    """

    folder: str
    shape: ModelShape | None = None
    num_parameters: int = 0
    targets: dict[Linear, int] = Field(default_factory=dict)
    stops: tuple[str, ...] = ()
    conversations: dict[str, str | None] = Field(default_factory=dict)
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
        config = _tried(problems, lambda: read_config(location))
        found: dict[str, Any] = {"folder": str(folder)}
        if config is not None:
            found |= _computed(config) | _chats(location, config, host, folder, problems)
            if (weights := _tried(problems, lambda: check_contents(location, read_all))) is not None:
                found |= _sizes(weights, config, lora, _ITEM_BYTES[dtype])
        return ModelLook(**found, problems=tuple(problems))


def _tried(problems: list[str], check: Callable[[], Any]) -> Any:
    """Return what a check returns; None, and a problem more, if it raises InvalidInput."""
    try:
        return check()
    except InvalidInput as error:
        problems.append(str(error))
        return None


def _computed(config: DenseConfig) -> dict[str, Any]:
    shape = shape_of(config)
    counts = {linear: shape.num_linears((linear,)) for linear in LINEARS if all(shape.linear_size(linear))}
    return {"shape": shape, "targets": {linear: num for linear, num in counts.items() if num}}


def _chats(
    location: Location, config: DenseConfig, host: HostContext, folder: Path, problems: list[str]
) -> dict[str, Any]:
    """Try the tokenizer and the chat template."""
    before = len(problems)
    _tried(problems, lambda: check_tokenizer(location, config.vocab_size, host))
    _tried(problems, lambda: check_chat_template(location))
    if len(problems) > before:
        return {}
    place = location.store.uri
    tokenizer: ModelTokenizer | None = _tried(problems, lambda: TokenizerFiles(folder=folder, place=place).load())
    if tokenizer is None or tokenizer.template is None:
        return {}
    template = tokenizer.template
    process: TemplateProcess | None = _tried(problems, lambda: TemplateProcess(template, place))
    if process is None:
        return {}
    with process:
        return {"stops": process.stops, "conversations": dict(_refused_rows(process))}


def _refused_rows(process: TemplateProcess) -> Iterator[tuple[str, str | None]]:
    for name, (messages, tools) in _PROBES.items():
        weights = [float(message["role"] == "assistant") for message in messages]
        try:
            process.spans([Chat("", messages, tools, weights)])
            yield name, None
        except InvalidInput as error:
            yield name, error.message


def _sizes(weights: Weights, config: DenseConfig, lora: Lora, item_bytes: int) -> dict[str, Any]:
    own = {
        name: tensor.shape
        for name, tensor in weights.tensors.items()
        if not name.startswith(config.carried) and not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    shape = shape_of(config)

    def row(engine: EngineName, layout: Layout) -> LayoutBytes:
        told: dict[str, Any] = {"engine": engine, "layout": layout.label, "ranks": layout.world_size}
        try:
            check_layout(layout, shape, engine)
        except InvalidInput as error:
            return LayoutBytes(**told, refused=str(error))
        of = rank_bytes(own, shape, layout, engine, item_bytes, lora)
        return LayoutBytes(**told, base_bytes=of.base, lora_bytes=of.lora, full_bytes=of.full)

    num_parameters = sum(math.prod(dims) for dims in own.values())
    return {"num_parameters": num_parameters, "layouts": tuple(row(*each) for each in _layouts(shape))}


def _layouts(shape: ModelShape) -> Iterator[tuple[EngineName, Layout]]:
    """Yield one rank, and each dimension alone over 2, 4 and 8."""
    yield "megatron", Layout()
    for num in _RANKS:
        yield "megatron", Layout(tp=num, sp=shape.num_experts > 0)
        yield "megatron", Layout(pp=num)
        if shape.num_experts:
            yield "megatron", Layout(ep=num, dp=num)
        yield "megatron", Layout(dp=num)
    try:
        check_family("fsdp", shape.family)
    except InvalidInput:
        return
    yield from (("fsdp", Layout(dp=num)) for num in _RANKS)
