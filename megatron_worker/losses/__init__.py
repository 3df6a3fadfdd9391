"""Losses: sums over a bin's targets. A new kind of loss needs a `case` in both functions here."""

from longshore.losses import DPO, KTO, BradleyTerry, CrossEntropy, Distillation, Loss, SquaredError
from megatron_worker.engine import LossFunction
from megatron_worker.losses import supervised
from megatron_worker.losses.policy import check_policy_columns, policy_loss
from megatron_worker.losses.preferences import (
    bradley_terry_loss,
    check_answers,
    check_pairs,
    check_scored_pairs,
    dpo_loss,
    kto_loss,
)
from megatron_worker.losses.supervised import distillation_loss, squared_error_loss
from megatron_worker.losses.targets import check_finite, check_teachers
from shared.jobs.packed import Units


def loss_function(loss: Loss, temperature: float = 1.0, has_critic: bool = False) -> LossFunction:
    """Return a loss. `temperature` divides its logits; that of preferences has none.

    `has_critic`: advantages are a critic's, of rewards that have lost the KL penalty, if it is theirs.
    """
    match loss:
        case CrossEntropy():
            return supervised.cross_entropy_loss(temperature)
        case DPO():
            return dpo_loss(loss)
        case SquaredError():
            return squared_error_loss(loss)
        case BradleyTerry():
            return bradley_terry_loss(loss)
        case KTO():
            return kto_loss(loss)
        case Distillation():
            return distillation_loss(loss, temperature)
        case _:
            return policy_loss(loss, temperature, has_critic)


def check_columns(units: Units, loss: Loss) -> None:
    """Raise InvalidInput, which names the column, the unit and the rule, if the data lacks what the loss needs."""
    match loss:
        case CrossEntropy():
            pass
        case Distillation():
            if loss.more_teachers:
                check_teachers(units, 1 + len(loss.more_teachers))
        case DPO():
            check_pairs(units)
        case SquaredError():
            check_finite(units, "advantage", f"the loss {loss.kind} learns it")
        case BradleyTerry():
            check_scored_pairs(units)
        case KTO():
            check_answers(units)
        case _:
            check_policy_columns(units, loss)
