"""The parallel layout of one worker: how many ranks, and what each dimension splits."""

from typing import Annotated, Literal

from pydantic import Field

from shared.errors import InvalidInput
from shared.models import Frozen

Degree = Annotated[int, Field(ge=1, le=4096)]
EngineName = Literal["megatron", "fsdp"]


class Layout(Frozen):
    """Degrees of tensor (tp), pipeline (pp), context (cp), expert (ep) and data (dp) parallelism.

    `ep` divides `dp * cp`: expert parallelism reuses those ranks, so the world is `tp * pp * cp * dp`.
    """

    tp: Degree = 1
    pp: Degree = 1
    cp: Degree = 1
    ep: Degree = 1
    dp: Degree = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def label(self) -> str:
        """Such as `tp2-dp2`; `single` for one rank."""
        parts = [f"{name}{degree}" for name, degree in self.model_dump().items() if degree > 1]
        return "-".join(parts) or "single"


class ModelShape(Frozen):
    """The sizes of a model that limit its layouts, read from a Hugging Face `config.json`."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    num_experts: int = 0


def check_layout(layout: Layout, shape: ModelShape) -> None:
    """Refuse a layout that cannot hold the model.

    Raises:
        InvalidInput: names the dimension and the rule that it breaks.
    """
    if layout.pp > 1 or layout.cp > 1 or layout.ep > 1:
        raise InvalidInput("pipeline, context and expert parallelism are not built yet: use tp and dp", "layout")
    for name, size in (
        ("attention heads", shape.num_heads),
        ("key/value heads", shape.num_kv_heads),
        ("feed-forward size", shape.ffn_size),
    ):
        if size % layout.tp:
            raise InvalidInput(f"tp={layout.tp} does not divide the model's {size} {name}", "layout.tp")


def broken_rule(engine: EngineName, layout: Layout) -> str | None:
    """What an engine refuses of a layout, whatever the model; None where it takes it."""
    if engine == "fsdp" and layout != Layout(dp=layout.dp):
        return f"the engine fsdp splits data and shards weights by dp alone: use dp, and no {layout.label}"
    return None
