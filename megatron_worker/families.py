"""What torch computes of a family's parts: rotary embeddings, activations, the choice of experts, rows of slices."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.errors import InvalidInput
from shared.families.architecture import Activation, Architecture, Attention, ClampedGate, Mixture, Rope
from shared.families.tensor_slices import TensorSlice

# --- The activations of MLPs and of experts ---


def activate(made: Tensor, activation: Activation, is_gated: bool) -> Tensor:
    """Return the input of an MLP's last linear: the activation of the first linear's outputs or, if it is gated, of
    their first half, times the second half."""
    gate, up = made.chunk(2, dim=-1) if is_gated else (made, None)
    match activation:
        case "silu":
            active = F.silu(gate)
        case "relu2":
            active = F.relu(gate).square()
        case "gelu_tanh":
            active = F.gelu(gate, approximate="tanh")
    return active if up is None else active * up


def clamped_gate(by: ClampedGate, gate: Tensor, up: Tensor) -> Tensor:
    """Return the product of gate and up that ClampedGate describes."""
    gate = gate.clamp(max=by.limit)
    return (up.clamp(-by.limit, by.limit) + 1) * gate * (by.alpha * gate).sigmoid()


# --- Rotary position embeddings: how each kind of scaling changes their frequencies ---


def rope_tables(rope: Rope, position_T: Tensor, frequency_D2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the positions' angles, [T, 1, size] each, for `rotary_frequencies`."""
    angle_TD2 = position_T.float()[:, None] * frequency_D2
    angle_T1D = torch.cat([angle_TD2, angle_TD2], dim=-1)[:, None]
    return (angle_T1D.cos() * rope.magnitude).to(dtype), (angle_T1D.sin() * rope.magnitude).to(dtype)


def rotated(heads_TXD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, sign: int = 1) -> Tensor:
    """Rotate each head's first half against its second by the angle of its token's position. If a head is larger than
    the tables, only the dimensions of the tables are rotated.

    It costs one product and two fused multiply-adds.
    """
    size = cos_T1D.shape[-1]
    if size < heads_TXD.shape[-1]:
        turned = rotated(heads_TXD[..., :size].contiguous(), cos_T1D, sin_T1D, sign)
        return torch.cat([turned, heads_TXD[..., size:]], dim=-1)
    output = heads_TXD * cos_T1D
    first, second = heads_TXD.chunk(2, dim=-1)
    output_first, output_second = output.chunk(2, dim=-1)
    sin_T1E = sin_T1D.chunk(2, dim=-1)[0]
    output_first.addcmul_(second, sin_T1E, value=-sign)
    output_second.addcmul_(first, sin_T1E, value=sign)
    return output


def check_lengths(position_T: Tensor, max_positions: int | None) -> None:
    """Raise InvalidInput if a sequence of a bin is longer than Architecture.max_positions."""
    if max_positions is not None and len(position_T) and (longest := int(position_T.max()) + 1) > max_positions:
        rule = f"by its rope scaling this model is computed for sequences of up to {max_positions}"
        raise InvalidInput(f"a sequence has {longest} tokens; {rule}", "rope_parameters")


def frequencies_of(a: Architecture, device: torch.device) -> dict[Rope, Tensor]:
    """Return the frequencies of each rotary embedding that layers have, as `rotary_frequencies` does."""
    ropes = {mixer.rope for mixer in a.mixers if isinstance(mixer, Attention) and mixer.rope}
    return {rope: rotary_frequencies(rope).to(device) for rope in ropes}


def rotary_frequencies(rope: Rope) -> Tensor:
    """Return the frequencies in radians a position, [size / 2] float32."""
    scaling, factor = rope.scaling, rope.scaling.factor or 1.0
    original = scaling.original_max_position_embeddings or 0
    exponent = torch.arange(0, rope.size, 2, dtype=torch.int64).float() / rope.size
    frequency = 1.0 / (rope.theta**exponent)
    match scaling.rope_type:
        case "linear":  # Chen et al. 2023, arXiv:2306.15595
            return frequency / factor
        case "longrope":  # each by its own number (Ding et al. 2024, arXiv:2402.13753), of short sequences
            return 1.0 / (torch.tensor(scaling.short_factor) * rope.theta**exponent)
        case "proportional":  # only the first ones turn
            num_turning = int((scaling.partial_rotary_factor or 1.0) * rope.size // 2)
            return (frequency / factor).masked_fill(torch.arange(len(frequency)) >= num_turning, 0.0)
        case "llama3":  # by their turns within the original positions (Grattafiori et al. 2024, arXiv:2407.21783, 3.4)
            turns = original * frequency / (2 * math.pi)
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            return _interpolated(frequency, factor, kept.clamp(0, 1))
        case "yarn":  # Peng et al. 2023, arXiv:2309.00071; with `truncate` the bounds are widened to whole dimensions
            bounds = scaling.beta_fast or 32.0, scaling.beta_slow or 1.0
            first, last = (_dimension_of(turns, original, rope) for turns in bounds)
            if scaling.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, rope.size - 1)
            last += 0.001 if first == last else 0.0
            index = torch.arange(rope.size // 2, dtype=torch.float32)
            return _interpolated(frequency, factor, 1 - ((index - first) / (last - first)).clamp(0, 1))
    return frequency


def _interpolated(frequency: Tensor, factor: float, kept: Tensor) -> Tensor:
    """Mix frequencies as they are, by their part `kept`, with the same divided by `factor`."""
    return (1 - kept) * frequency / factor + kept * frequency


def _dimension_of(turns: float, original: int, rope: Rope) -> float:
    """Return the dimension, not a whole number, whose frequency turns so often within the original positions."""
    return rope.size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


# --- The experts that each token goes to, and their weights: one formula for trainer and sampler ---
#
# Shape suffixes: T tokens, H hidden size, E experts, K experts of a token, G groups of X experts each.


def scores(hidden_TH: Tensor, router_EH: Tensor, mixture: Mixture, bias_E: Tensor | None = None) -> Tensor:
    """Return how much each token wants of each expert, [T, E], in float32 (or more); logits as they are computed."""
    wide = torch.promote_types(torch.float32, hidden_TH.dtype)
    match mixture.scoring:
        case "softmax":
            return F.linear(hidden_TH, router_EH).softmax(dim=-1, dtype=wide)
        case "chosen softmax":
            return F.linear(hidden_TH, router_EH, bias_E)
        case "sigmoid":
            return F.linear(hidden_TH.to(wide), router_EH.to(wide)).sigmoid()


def choose(score_TE: Tensor, mixture: Mixture, correction_E: Tensor | None = None) -> Tensor:
    """Return the numbers of the experts with the highest scores, [T, K].

    With groups, only from the groups whose two best experts have the highest sums (DeepSeek-AI 2024, arXiv:2412.19437,
    section 2.1.2).

    `correction_E`: added to scores only for the choice, so that experts are chosen equally often.
    """
    wanted_TE = score_TE.detach() if correction_E is None else score_TE.detach() + correction_E
    if mixture.chosen_groups < mixture.num_groups:
        wanted_TGX = wanted_TE.unflatten(1, (mixture.num_groups, -1))
        group_TC = wanted_TGX.topk(2, dim=-1).values.sum(-1).topk(mixture.chosen_groups, dim=-1).indices
        is_out_TG = torch.ones_like(wanted_TGX[..., 0], dtype=torch.bool).scatter(1, group_TC, False)
        wanted_TE = wanted_TGX.masked_fill(is_out_TG[..., None], -torch.inf).flatten(1)
    return wanted_TE.topk(mixture.experts_per_token, dim=-1).indices


def weights(score_TE: Tensor, expert_TK: Tensor, mixture: Mixture) -> Tensor:
    """Return the weights of the chosen experts' outputs, [T, K]."""
    weight_TK = score_TE.gather(1, expert_TK)
    if mixture.scoring == "chosen softmax":
        return weight_TK.softmax(dim=-1)
    if mixture.is_normalised:
        weight_TK = weight_TK / (weight_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weight_TK * mixture.scale


# --- A rank's share of the tensors that slices describe ---
# Its part of a whole tensor, and the rows of a parameter.


def sum_of_experts(
    x_TH: Tensor, weight_TK: Tensor, expert_TK: Tensor, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Return each token's weighted sum of `expert(number, x_MH)`, added up in the order of the experts' numbers."""
    total_TH = torch.zeros_like(x_TH)
    for number in expert_TK.unique().tolist():
        token_M, choice_M = (expert_TK == number).nonzero(as_tuple=True)
        total_TH.index_add_(0, token_M, expert(number, x_TH[token_M]) * weight_TK[token_M, choice_M, None])
    return total_TH


def parts_of(s: TensorSlice, whole: Tensor, rank: int, size: int) -> list[Tensor]:
    """Return views of a rank's parts of the whole tensor, a section each."""
    if s.split is None:
        return [whole]
    return [whole.narrow(s.split, span.start, span.stop - span.start) for span in s.spans(rank, size)]


def local_of(s: TensorSlice, whole: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's part of the whole tensor."""
    return join_parts(parts_of(s, whole, rank, size), s.split)


def join_parts(parts: Sequence[Tensor], split: int | None) -> Tensor:
    """Join a rank's parts of a tensor. One part alone stays a view."""
    return parts[0] if split is None or len(parts) == 1 else torch.cat(list(parts), dim=split)


def write_slice(s: TensorSlice, parameter: Tensor, local: Tensor) -> None:
    """Copy a rank's part of the tensor into its rows of the parameter."""
    target = _rows(s, parameter, s.start + local.shape[0] // s.groups)
    target.copy_(local.reshape(target.shape))


def read_slice(s: TensorSlice, parameter: Tensor, num_rows: int, rows_before: int = 0) -> Tensor:
    """Return what `write_slice` wrote: `num_rows` rows of a rank's part, after the first `rows_before`, contiguous."""
    rows = _rows(s, parameter, s.start + (rows_before + num_rows) // s.groups)[:, rows_before:]
    return rows.reshape(num_rows, *parameter.shape[1:]).contiguous()


def _rows(s: TensorSlice, parameter: Tensor, stop: int) -> Tensor:
    return parameter.view(s.groups, -1, *parameter.shape[1:])[:, s.start : stop]
