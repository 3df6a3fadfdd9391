"""Each preference loss against TRL's on the same log-probabilities: values and gradients, in float64.

    python -m pip install --no-deps --target TRL trl accelerate datasets ...  # and what their imports ask for
    PYTHONPATH=TRL python -m benchmarks.preference_losses [--out benchmarks/results/preference_losses.json]

Longshore does not depend on TRL: it is installed into a separate folder. Its trainers' own functions are called, with a
model that returns the given log-probabilities. TRL averages the cross entropy of chosen answers over the tokens of a
batch; we average over answers, and within each over its tokens, as the papers do. For losses with this term all answers
have the same length (`equal_lengths`). TRL's ORPO includes the prompt in it: for ORPO only the odds ratio is compared.
"""

import argparse
import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.machine import provenance
from longshore.losses import DPO, KTO, Loss
from megatron_worker.engine import Batch, Scores
from megatron_worker.losses import loss_function

BETA, GAMMA, SHARE, ALPHA, NUM_PAIRS, MOST = 0.3, 0.4, 0.1, 0.7, 6, 7
WANTED = 1e-6  # of the value and of the gradient's norm, relative; TRL computes ORPO's odds in float32
CASES: dict[str, tuple[DPO, list[str]]] = {
    "sigmoid": (DPO(beta=BETA), ["sigmoid"]),
    "ipo": (DPO(objective="ipo", beta=BETA), ["ipo"]),
    "hinge": (DPO(objective="hinge", beta=BETA), ["hinge"]),
    "robust": (DPO(objective="robust", beta=BETA, label_smoothing=SHARE), ["robust"]),
    "apo_zero": (DPO(objective="apo_zero", beta=BETA), ["apo_zero"]),
    "apo_down": (DPO(objective="apo_down", beta=BETA), ["apo_down"]),
    "sigmoid and rpo_alpha": (DPO(beta=BETA, rpo_alpha=ALPHA), ["sigmoid", "sft"]),
    "ipo and rpo_alpha": (DPO(objective="ipo", beta=BETA, rpo_alpha=ALPHA), ["ipo", "sft"]),
}


@dataclasses.dataclass(frozen=True)
class Answers:
    """Log-probabilities of answers' tokens, [answers, MOST], 0 where there is none; the chosen before the rejected."""

    logprob: Tensor
    ref: Tensor
    mask: Tensor


def drawn(seed: int, num: int, lengths: int | None = None) -> Answers:
    """`lengths`: of each answer; random if absent."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, MOST + 1, (num, 1), generator=generator) if lengths is None else lengths
    mask = torch.arange(MOST)[None] < length * torch.ones(num, 1)
    logprob, ref = (-torch.rand(num, MOST, generator=generator, dtype=torch.float64) * 3 - 0.05 for _ in range(2))
    return Answers((logprob * mask).requires_grad_(), ref * mask, mask)


def ours(loss: Loss, answers: Answers, sequence: Tensor, advantage: Tensor, weight: Tensor) -> Tensor:
    """The mean loss. `sequence`, `advantage`, `weight`: each answer's sequence number, and its targets' values."""
    rows, columns = answers.mask.nonzero(as_tuple=True)
    empty = Batch.empty(torch.device("cpu"))
    batch = dataclasses.replace(
        empty,
        label_N=rows,
        weight_N=weight[rows],
        advantage_N=advantage[rows],
        ref_logprob_N=answers.ref[rows, columns],
        sequence_N=sequence[rows],
    )
    scores, function = Scores(answers.logprob[rows, columns]), loss_function(loss)
    if function.baseline is not None:
        scored, loss_of = function.baseline
        function = loss_of({name: float(value) for name, value in scored.sums(scores, batch).detached().items()})
    sums = function.sums(scores, batch)
    return sums.loss / sums.weight


def of_pairs(loss: DPO, answers: Answers) -> Tensor:
    number, one = torch.arange(len(answers.mask) // 2), torch.ones(len(answers.mask) // 2, dtype=torch.float64)
    return ours(loss, answers, torch.cat([2 * number, 2 * number + 1]), torch.cat([one, -one]), torch.cat([one, one]))


class _AnswersModel:
    """Answers a trainer's call with given log-probabilities, chosen by the width of `input_ids`."""

    training = True

    def __init__(self, *answers: Answers) -> None:
        self._by_width = {each.mask.shape[1] + 1: each.logprob for each in answers}

    def __call__(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        logprob = self._by_width[input_ids.shape[1]]
        flat = torch.zeros_like(logprob.detach())
        return SimpleNamespace(log_probs=logprob, entropy=flat, mean_logits=flat, is_top1=flat.bool())


def _trainer(**attributes: Any) -> Any:
    """The attributes of a trainer that TRL's functions read."""
    from accelerate import Accelerator

    usual = {
        "model": SimpleNamespace(training=True),
        "accelerator": Accelerator(cpu=True),
        "beta": BETA,
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**(usual | attributes))


def _inputs(answers: Answers, prefix: str = "") -> dict[str, Tensor]:
    """A batch of whole rows: one token of a prompt, then the answer."""
    prompt = torch.zeros(len(answers.mask), 1, dtype=torch.long)
    mask = torch.cat([prompt, answers.mask.long()], dim=1)
    names = {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    return {prefix + name: value for name, value in names.items()}


def trls_of_pairs(types: list[str], loss: DPO, answers: Answers) -> Tensor:
    from trl.trainer.dpo_trainer import DPOTrainer

    trainer = _trainer(
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=types,
        loss_weights=[1.0, loss.rpo_alpha][: len(types)],
        label_smoothing=loss.label_smoothing,
        use_weighting=False,
    )
    chosen, rejected = answers.ref.sum(1).chunk(2)
    inputs = _inputs(answers) | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    return cast(Tensor, DPOTrainer._compute_loss(trainer, _AnswersModel(answers), inputs, False))


def means(answers: Answers) -> tuple[Tensor, Tensor]:
    chosen, rejected = (answers.logprob.sum(1) / answers.mask.sum(1)).chunk(2)
    return chosen, rejected


def trls_simpo(answers: Answers) -> Tensor:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    trainer = _trainer(alpha=0.0, loss_type="simpo", simpo_gamma=GAMMA, label_smoothing=0.0)
    return cast(Tensor, CPOTrainer.cpo_loss(trainer, *means(answers))[0].mean())


def trls_odds(answers: Answers) -> Tensor:
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    return -cast(Tensor, ORPOTrainer.odds_ratio_loss(_trainer(), *means(answers))[0].mean())


def our_odds(answers: Answers) -> Tensor:
    return of_pairs(DPO(objective="orpo", beta=BETA), answers) + means(answers)[0].mean()


def compared_kto(away: float) -> dict[str, float]:
    """`away`: distance of the policy from its reference on each token of answers to other prompts, without noise."""
    from trl.trainer.kto_trainer import KTOTrainer

    kto = KTO(beta=BETA, desirable_weight=1.3, undesirable_weight=0.6)
    own, short = drawn(3, NUM_PAIRS), drawn(4, NUM_PAIRS)
    logprob, ref = short.logprob.detach(), short.ref - away * short.mask
    other = Answers(wider(logprob), wider(ref), wider(short.mask))  # another width, so that the model knows them
    is_good = torch.arange(NUM_PAIRS) % 3 != 0
    trainer = _trainer(
        calculate_KL=True, loss_type="kto", desirable_weight=1.3, undesirable_weight=0.6, precompute_ref_logps=True
    )
    model = _AnswersModel(own, other)
    trainer._compute_kl_logps = lambda asked, batch: KTOTrainer._compute_kl_logps(trainer, asked, batch)
    references = {"ref_logps": own.ref.sum(1), "ref_KL_logps": other.ref.sum(1), "label": is_good}
    inputs = _inputs(own) | _inputs(other, "KL_") | references
    both = Answers(
        torch.cat([wider(own.logprob), other.logprob]),
        torch.cat([wider(own.ref), other.ref]),
        torch.cat([wider(own.mask), other.mask]),
    )
    number, sign = torch.arange(NUM_PAIRS), is_good.double() * 2 - 1
    zeros, ones = torch.zeros(NUM_PAIRS, dtype=torch.float64), torch.ones(NUM_PAIRS, dtype=torch.float64)
    signs, weights = torch.cat([sign, zeros]), torch.cat([ones, zeros])
    mine = ours(kto, both, torch.cat([2 * number, 2 * number + 1]), signs, weights)
    theirs = cast(Tensor, KTOTrainer._compute_loss(trainer, model, inputs, False))
    return difference(mine, theirs, own) | {"baseline": trainer._metrics["train"]["kl"][0]}


def wider(tensor: Tensor) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 1))


def difference(mine: Tensor, theirs: Tensor, answers: Answers) -> dict[str, float]:
    """Values, and how far value and gradient are apart, relative."""
    own, trls = (torch.autograd.grad(value, answers.logprob)[0] * answers.mask for value in (mine, theirs))
    return {
        "ours": mine.item(),
        "trl": theirs.item(),
        "value": abs(mine.item() / theirs.item() - 1),
        "gradient": ((own - trls).norm() / trls.norm()).item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    import transformers
    import trl

    rows: dict[str, dict[str, float]] = {}
    for name, (loss, types) in CASES.items():
        answers = drawn(1, 2 * NUM_PAIRS, 5 if loss.rpo_alpha else None)
        rows[name] = difference(of_pairs(loss, answers), trls_of_pairs(types, loss, answers), answers)
    free: dict[str, tuple[Callable[[Answers], Tensor], Callable[[Answers], Tensor]]] = {
        "simpo": (lambda given: of_pairs(DPO(objective="simpo", beta=BETA, gamma=GAMMA), given), trls_simpo),
        "orpo's odds ratio": (our_odds, trls_odds),
    }
    for name, (mine, theirs) in free.items():
        answers = drawn(2, 2 * NUM_PAIRS)
        rows[name] = difference(mine(answers), theirs(answers), answers)
    rows |= {"kto, baseline above 0": compared_kto(0.5), "kto, baseline held at 0": compared_kto(-0.5)}
    for name, row in rows.items():
        print(f"{name:24} {row['ours']:.9f} {row['trl']:.9f}  value {row['value']:.1e}  gradient {row['gradient']:.1e}")
    beyond = [name for name, row in rows.items() if max(row["value"], row["gradient"]) > WANTED]
    releases = {"trl": trl.__version__, "transformers": transformers.__version__}
    if out is not None:
        found = {**provenance(), "releases": releases, "wanted": WANTED, "equal_lengths": "rpo_alpha", "losses": rows}
        out.write_text(json.dumps(found, indent=1) + "\n")
    if beyond:
        raise SystemExit(f"beyond {WANTED:g}: {', '.join(beyond)}")


if __name__ == "__main__":
    main()
