"""From a number for each token to a sum and its normaliser. Both add up over bins: a sequence lies whole in one.

Shape suffixes: N live targets of a bin, S sequences of a bin.
"""

from torch import Tensor

from shared.jobs.job import PolicyLoss


def sums_of_sequences(value_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """[S]: the sum of each sequence's values. `sequence_N`: int64, 0 to num_sequences - 1."""
    return value_N.new_zeros(num_sequences).index_add(0, sequence_N, value_N)


def aggregate(
    value_N: Tensor, weight_N: Tensor, sequence_N: Tensor, num_sequences: int, loss: PolicyLoss
) -> tuple[Tensor, Tensor]:
    """The sum of a bin, and what the sum over all bins is to be divided by.

    token_mean: sum_n w_n v_n over sum_n w_n. sequence_mean: sum_s (sum_n w_n v_n / sum_n w_n) over S.
    constant_length: sum_n w_n v_n / L over S (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2).
    """
    sequences = weight_N.new_tensor(float(num_sequences))
    match loss.aggregation:
        case "token_mean":
            return _total(weight_N * value_N), weight_N.sum()
        case "sequence_mean":
            length_S = sums_of_sequences(weight_N, sequence_N, num_sequences)
            return _total(value_N * weight_N / length_S[sequence_N]), sequences
        case "constant_length":
            assert loss.constant is not None
            return _total(weight_N * value_N) / loss.constant, sequences


def _total(value_N: Tensor) -> Tensor:
    """In float64: surrogates of either sign cancel, and a sum must not depend on how bins were cut."""
    return value_N.double().sum()
