"""What is trained, and how: an adapter or every weight, the optimizer, a session."""

import math
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from longshore.fields import Frozen, Name
from longshore.layout import EngineName, Layout, engine_takes_the_layout

Linear = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "in_proj", "fc1_latent_proj", "fc2_latent_proj",
    "qkv_proj", "gate_up_proj", "c_fc", "c_proj", "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h",
]  # fmt: skip
LINEARS: tuple[Linear, ...] = get_args(Linear)
DELTA_NET: tuple[Linear, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
"""The linears of a gated delta net, which some layers of a hybrid model have in the place of attention."""
LATENT: tuple[Linear, ...] = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""Linears of multi-head latent attention, in the place of those that make queries, keys and values."""
MAMBA: tuple[Linear, ...] = ("in_proj",)
"""The linears of a Mamba-2 mixer that take adapters: PEFT refuses them beside its `out_proj`."""
LATENT_EXPERTS: tuple[Linear, ...] = ("fc1_latent_proj", "fc2_latent_proj")
"""The linears around experts that work in fewer dimensions than the model."""
Dtype = Literal["float32", "bfloat16"]
DtypeChoice = Literal["auto", "float32", "bfloat16"]
DTYPE_DESCRIPTION = "precision of weights and activations; auto: bfloat16 where it is fast on the GPU hosts"


class Lora(Frozen):
    """Low-rank adapters beside the named linears (Hu et al. 2021, arXiv:2106.09685): y += B A x * scale.

    The scale is alpha / rank, or alpha / sqrt(rank) where it is `rank_stabilized` (Kalajdzievski 2023,
    arXiv:2312.03732).
    """

    kind: Literal["lora"] = "lora"
    rank: int = Field(default=16, ge=1, le=1024, description="rank of the two factors")
    alpha: float = Field(default=32.0, gt=0, description="the adapter's output is scaled by alpha / rank")
    targets: tuple[Linear, ...] = Field(
        default=LINEARS, min_length=1, description="linears with an adapter, of those that the model has"
    )

    rank_stabilized: bool = Field(default=False, description="the scale is alpha / sqrt(rank), as PEFT's use_rslora")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


class Full(Frozen):
    """Train every weight."""

    kind: Literal["full"] = "full"


Trainable = Annotated[Lora | Full, Field(discriminator="kind")]


class Adam(Frozen):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101); `clip_norm` bounds the global gradient norm, 0 for none."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, ge=0)


ModelUri = Annotated[
    str, Field(min_length=1, max_length=2048, description="a folder, file:// or s3:// URI, hub id or published name")
]


class SessionRun(Frozen):
    """A session: a slot that a client trains itself, command by command, until it closes the session.

    A session without commands gives its worker back after a while, and leases another one at its next command.
    """

    kind: Literal["session"] = "session"
    schema_version: Literal[1] = 1
    name: Name | None = Field(default=None, description="what adapters are published as; the session's id if absent")
    model: ModelUri
    trainable: Trainable = Lora()
    initial_adapter: str | None = Field(default=None, description="a published adapter to go on from: URI or name")
    max_tokens: int = Field(default=2048, ge=2, le=1_048_576, description="longest sequence; tokens of a micro-batch")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of fresh adapter weights")
    engine: EngineName = Field(default="megatron", description="what trains; fsdp: layouts of dp and tp alone")
    layout: Layout = Layout()
    dtype: DtypeChoice = Field(default="auto", description=DTYPE_DESCRIPTION)
    idle_s: float = Field(default=60.0, ge=0, le=86_400, description="seconds until an idle worker is given back")
    save_after_s: float = Field(
        default=30.0, gt=0, le=86_400, description="seconds of commands after which the state is saved by itself"
    )
    keep_states: int = Field(
        default=32, ge=1, le=1000, description="so many states of save_state stay, the newest; load_state names one"
    )
    gap_s: float = Field(
        default=600.0, gt=0, le=86_400, description="how long a command waits for those before it, until it fails"
    )

    _engine_takes_the_layout = model_validator(mode="after")(engine_takes_the_layout)

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        if self.initial_adapter is not None and self.trainable.kind == "full":
            raise ValueError("full training does not go on from an adapter: drop initial_adapter, or train a lora")
        return self
