"""Nemotron-H and Nemotron 3: each layer is a Mamba-2 mixer, attention without positions, an MLP, or experts.

MLPs have no gate; experts may work in fewer dimensions than the model. The bias that corrects a router's choice is not
trained: it is read in float32 in any precision, and copied unchanged.
"""

from dataclasses import replace

from shared.families.architecture import Architecture, Mamba2, Mixer, Mixture, Mlp
from shared.families.deepseek_v3 import corrections
from shared.families.tensor_slices import TensorSlice
from shared.models.families import NemotronHConfig


def architecture(alike: Architecture, config: NemotronHConfig) -> Architecture:
    """Return the architecture, given one whose layers are all attention and experts."""
    mamba = Mamba2(
        num_heads=config.mamba_num_heads,
        head_size=config.mamba_head_dim,
        state_size=config.ssm_state_size,
        num_groups=config.n_groups,
        conv_width=config.conv_kernel,
        conv_bias=config.use_conv_bias,
        least_step=config.time_step_min,
    )
    mixers: dict[str, Mixer] = {"mamba": mamba, "attention": replace(alike.attention, rope=None)}
    mlps = tuple(
        _ungated(mlp, config) if block in ("mlp", "moe") else None
        for mlp, block in zip(alike.mlps, config.blocks, strict=True)
    )
    whole = replace(alike, mixers=tuple(map(mixers.get, config.blocks)), mlps=mlps)
    return replace(whole, carried=(*config.carried, *(s.name for s in corrections(whole))))


def _ungated(mlp: Mlp | Mixture | None, config: NemotronHConfig) -> Mlp | Mixture:
    assert mlp is not None
    ungated = replace(mlp, activation="relu2", is_gated=False)
    return replace(ungated, latent_size=config.moe_latent_size or 0) if isinstance(ungated, Mixture) else ungated


def mamba_slices(mamba: Mamba2, hidden_size: int, tp: int, theirs: str, ours: str) -> list[TensorSlice]:
    """Return the tensors of a Mamba-2 mixer. Each rank has some groups of heads.

    PEFT refuses adapters of this family's `out_proj`, since kernels that transformers uses do not call that module.
    """
    values, heads = mamba.num_values, mamba.num_heads

    def split(name: str, parameter: str, sizes: tuple[int, ...], *rest: int) -> TensorSlice:
        sections = sizes if len(sizes) > 1 else ()
        names, num_rows = (f"{theirs}.{name}", f"{ours}.{parameter}"), sum(sizes)
        return TensorSlice(*names, (num_rows, *rest), 0, 0, num_rows // tp, sections=sections)

    out = f"{theirs}.out_proj.weight", f"{ours}.out_proj.weight", (hidden_size, values)
    slices = [
        split("in_proj.weight", "in_proj.weight", mamba.made_sizes, hidden_size),
        split("conv1d.weight", "conv_weight", mamba.mixed_sizes, 1, mamba.conv_width),
        split("A_log", "A_log", (heads,)),
        split("D", "D", (heads,)),
        split("dt_bias", "dt_bias", (heads,)),
        split("norm.weight", "output_scale", (values,)),
        TensorSlice(*out, 1, 0, hidden_size, takes_adapter=False),
    ]
    return slices + [split("conv1d.bias", "conv_bias", mamba.mixed_sizes)] * mamba.conv_bias
