"""Each policy loss and its advantages against TRL's and verl's on the same numbers, in float64.

    python -m pip install --no-deps --target LIBRARIES trl verl tensordict ray ...  # and what their imports ask for
    PYTHONPATH=LIBRARIES python -m benchmarks.policy_losses [--out benchmarks/results/policy_losses.json]

Longshore depends on neither: they are installed into a separate folder. The benchmark calls TRL's trainers'
`_compute_loss`, and the functions of `verl.trainer.ppo.core_algos` and `rollout_corr_helper` that verl's actor calls.
Gradients are those of log-probabilities and entropies. If a formula differs, `differs` says how: the comparison then
corrects for it, and `plain` has the difference without the correction.
"""

import argparse
import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from activities.trajectories.pack_trajectories import advantages_of
from benchmarks.machine import provenance
from longshore.losses import CISPO, DRO, GMPO, GSPO, PPO, SAPO, AdvantageKind, Kl, PolicyLoss, Reinforce
from megatron_worker.engine import Batch, Scores
from megatron_worker.losses import loss_function

NUM, GROUP, MOST = 12, 4, 9  # sequences, of a group, the longest's tokens
WANTED = 1e-6  # of the value and of the gradient's norm, relative
NEVER, MOST_TOKENS, DUAL, IMPORTANCE, FLOOR, BEHIND = 1e9, 32, 1.5, 1.3, 0.8, 0.1


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Columns of sequences, [NUM, MOST] in float64. `logprob` and `entropy` have a gradient; `mask`: real tokens."""

    logprob: Tensor
    entropy: Tensor
    old: Tensor
    ref: Tensor
    sampler: Tensor
    advantage: Tensor
    mask: Tensor

    def gradient(self, value: Tensor) -> Tensor:
        found = torch.autograd.grad(value, [self.logprob, self.entropy], allow_unused=True, retain_graph=True)
        return torch.stack([torch.zeros_like(self.old) if each is None else each * self.mask for each in found])


def drawn() -> Drawn:
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(MOST)[None] < torch.randint(1, MOST + 1, (NUM, 1), generator=generator)
    noise = [torch.randn(NUM, MOST, generator=generator, dtype=torch.float64) * 0.3 for _ in range(4)]
    logprob = -torch.rand(NUM, MOST, generator=generator, dtype=torch.float64) * 3 - 0.05
    advantage = torch.randn(NUM, 1, generator=generator, dtype=torch.float64).expand(NUM, MOST)
    old = logprob + noise[0]
    entropy = noise[3].abs()
    return Drawn(
        logprob.requires_grad_(), entropy.requires_grad_(), old, logprob.detach() + noise[1], old + noise[2], advantage,
        mask,
    )  # fmt: skip


def ours(loss: PolicyLoss, of: Drawn) -> Tensor:
    rows, columns = of.mask.nonzero(as_tuple=True)
    batch = dataclasses.replace(
        Batch.empty(torch.device("cpu")),
        label_N=rows,
        weight_N=torch.ones(len(rows), dtype=torch.float64),
        advantage_N=of.advantage[rows, columns],
        old_logprob_N=of.old[rows, columns],
        ref_logprob_N=of.ref[rows, columns],
        sampler_logprob_N=(of.sampler if loss.old == "trainer" else of.old)[rows, columns],
        sequence_N=rows,
    )
    sums = loss_function(loss).sums(Scores(of.logprob[rows, columns], of.entropy[rows, columns]), batch)
    return sums.loss / sums.weight


Theirs = Callable[[Drawn], Tensor]


def trls(loss_type: str, level: str = "token", **settings: Any) -> Theirs:
    """TRL's loss. `settings`: of its trainer and arguments. gmpo and rloo have their own trainers in TRL."""
    from accelerate import Accelerator
    from trl.experimental.gmpo import GMPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    kind: Any = {"gmpo": GMPOTrainer, "rloo": RLOOTrainer}.get(loss_type, GRPOTrainer)

    def loss(of: Drawn) -> Tensor:
        usual = {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "delta": None, "use_bias_correction_kl": False}
        settings_of = {**usual, "off_policy_mask_threshold": None, "entropy_coef": 0.0, **settings}
        trainer = SimpleNamespace(
            **settings_of,
            args=SimpleNamespace(**settings_of, steps_per_generation=1),
            loss_type=loss_type,
            importance_sampling_level=level,
            max_completion_length=MOST_TOKENS,
            model=SimpleNamespace(training=False),
            accelerator=Accelerator(cpu=True),
            aux_loss_enabled=False,
            use_vllm=False,
            top_entropy_quantile=1.0,
            use_adaptive_entropy=False,
            _entropy_bonus_enabled=settings_of["entropy_coef"] > 0,
            _metrics=defaultdict(lambda: defaultdict(list)),
            _get_per_token_logps_and_entropies=lambda *_, **__: (of.logprob, of.entropy, None),
            get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        )
        none = torch.zeros(NUM, 0, dtype=torch.long)
        inputs = {
            "prompt_ids": none,
            "prompt_mask": none,
            "completion_ids": torch.zeros(NUM, MOST, dtype=torch.long),
            "completion_mask": of.mask.double(),
            "advantages": of.advantage[:, 0],
            "old_per_token_logps": of.old,
            "old_logps": (of.old * of.mask).sum(1),
            "ref_per_token_logps": of.ref,
            "num_items_in_batch": of.mask.sum(),
        }
        return cast(Tensor, kind._compute_loss(trainer, trainer.model, inputs))

    return loss


def verls(
    name: str,
    aggregation: str = "token-mean",
    kl: tuple[float, str] | None = None,
    entropy: float = 0.0,
    importance: tuple[str, Any] | None = None,
    **settings: Any,
) -> Theirs:
    """verl's loss, and its KL and entropy terms. `kl`: coefficient, estimator; `importance`: level, threshold."""
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.workers.config import ActorConfig, PolicyLossConfig

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=PolicyLossConfig(**settings.pop("policy_loss", {})),
        global_batch_info={"loss_scale_factor": MOST_TOKENS},
        **{"clip_ratio_c": NEVER, **settings},
    )

    def loss(of: Drawn) -> Tensor:
        mask = of.mask.double()
        weights = None
        if importance is not None:
            level, threshold = importance
            by = rollout_corr_helper.compute_rollout_correction_weights
            weights, _ = by(of.old - of.sampler, mask, rollout_is=level, rollout_is_threshold=threshold)
        if name == "reinforce":
            ratio = (of.logprob - of.old).exp().detach()
            own = core_algos.compute_policy_loss_reinforce
            value, _ = own(of.old, of.logprob, of.advantage, mask, aggregation, config, ratio)
        else:
            function = core_algos.get_policy_loss_fn(name)
            value, _ = function(of.old, of.logprob, of.advantage, mask, aggregation, config, weights)
        terms = [(-entropy, of.entropy)] if entropy else []
        if kl is not None:
            terms.append((kl[0], core_algos.kl_penalty(of.logprob, of.ref, kl[1])))
        for coefficient, term in terms:
            value = value + coefficient * core_algos.agg_loss(term, mask, aggregation, **config.global_batch_info)
        return cast(Tensor, value)

    return loss


def mean(value: Callable[[Drawn], Tensor]) -> Theirs:
    """The constant difference of another loss: a mean over tokens, without a gradient."""
    return lambda of: (value(of) * of.mask).sum().detach() / of.mask.sum()


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss of ours and of others. `differs`: how theirs differs. `less`: a constant to subtract from theirs."""

    loss: PolicyLoss
    trl: Theirs | None = None
    verl: Theirs | None = None
    differs: str | None = None
    less: Theirs | None = None


def cases() -> dict[str, Case]:
    mean_of_means = "seq-mean-token-mean"
    wide: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    near: dict[str, Any] = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    trainer: dict[str, Any] = {"old": "trainer", "truncated_importance": IMPORTANCE}
    masked = {"importance_beyond": "mask", "importance_floor": FLOOR}
    bounds = f"{FLOOR}_{IMPORTANCE}"

    def nearer(kind: Any) -> Kl:
        return Kl(coefficient=0.04, estimator=kind)

    return {
        "grpo": Case(
            PPO(aggregation="sequence_mean", kl=nearer("k3")),
            trls("grpo", beta=0.04),
            verls("vanilla", mean_of_means, kl=(0.04, "k3")),
        ),
        "grpo, token mean": Case(PPO(), trls("bnpo"), verls("vanilla")),
        "dr_grpo": Case(
            PPO(aggregation="constant_length", constant=MOST_TOKENS),
            trls("dr_grpo"),
            verls("vanilla", "seq-mean-token-sum-norm"),
        ),
        "dapo": Case(PPO(clip_high=0.28), trls("dapo", epsilon_high=0.28), verls("vanilla", **wide)),
        "dual clip": Case(PPO(dual_clip=DUAL), trls("bnpo", delta=DUAL), verls("vanilla", clip_ratio_c=DUAL)),
        "gspo, token": Case(GSPO(), None, verls("gspo", mean_of_means, **near)),
        "gspo, sequence": Case(
            GSPO(level="sequence"),
            trls("grpo", "sequence", epsilon_low=3e-4, epsilon_high=4e-4),
            verls("gspo", mean_of_means, **near),
        ),
        "gspo, wider": Case(
            GSPO(level="sequence", clip_low=0.2, clip_high=0.2), trls("grpo", "sequence"), verls("gspo", mean_of_means)
        ),
        "cispo": Case(
            CISPO(clip_high=0.28),
            trls("cispo", epsilon_high=1.28),
            verls("cispo", clip_ratio_low=1.0, clip_ratio_high=0.28),
        ),
        "gmpo": Case(
            GMPO(),
            trls("gmpo", epsilon_low=0.4, epsilon_high=0.4),
            verls("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4),
        ),
        "sapo": Case(
            SAPO(), trls("sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05), verls("sapo", mean_of_means)
        ),
        "dro": Case(
            DRO(beta=0.3),
            None,
            verls("dro", policy_loss={"dro_beta": 0.3}),
            "verl: -A l for -A (l - l_old), a constant less",
            mean(lambda of: -of.advantage * of.old),
        ),
        "rloo, on policy": Case(
            Reinforce(aggregation="constant_length", constant=1),
            trls("rloo"),
            None,
            "TRL: -R A of the sequence's ratio R, clipped, for the sum of -r A; on policy the same gradient",
            lambda of: ((of.mask.sum(1) - 1) * of.advantage[:, 0]).mean(),
        ),
        "reinforce": Case(
            Reinforce(),
            None,
            verls("reinforce"),
            "verl: -sg(r) A l for -r A, the same gradient",
            mean(lambda of: (of.logprob - of.old).exp() * of.advantage * (1 - of.logprob)),
        ),
        **{
            f"kl {kind}": Case(
                PPO(kl=nearer(kind)),
                trls("bnpo", beta=0.04) if kind == "k3" else None,
                verls("vanilla", kl=(0.04, kind)),
            )
            for kind in ("k1", "k2", "k3")
        },
        "entropy": Case(PPO(entropy_coefficient=0.1), trls("bnpo", entropy_coef=0.1), verls("vanilla", entropy=0.1)),
        "importance, token": Case(PPO(**trainer), None, verls("vanilla", importance=("token", IMPORTANCE))),
        "importance, sequence": Case(
            PPO(**trainer, importance_level="sequence"), None, verls("vanilla", importance=("sequence", IMPORTANCE))
        ),
        "importance, token masked": Case(
            PPO(**trainer, **masked), None, verls("vanilla", importance=("token", bounds))
        ),
        "importance, sequence masked": Case(
            PPO(**trainer, **masked, importance_level="sequence"),
            None,
            verls("vanilla", importance=("sequence", bounds)),
        ),
        "off-policy mask": Case(PPO(off_policy_bound=BEHIND), trls("bnpo", off_policy_mask_threshold=BEHIND)),
    }


def compared(name: str, case: Case, of: Drawn) -> Iterator[tuple[str, dict[str, Any]]]:
    if "on policy" in name:
        of = dataclasses.replace(of, old=of.logprob.detach())
    own = ours(case.loss, of)
    for library, theirs in (("trl", case.trl), ("verl", case.verl)):
        if theirs is None:
            continue
        plain = theirs(of)
        value = plain if case.less is None else plain - case.less(of)
        mine, others = of.gradient(own), of.gradient(plain)
        row: dict[str, Any] = {
            "ours": own.item(),
            "theirs": plain.item(),
            "value": abs(own.item() / value.item() - 1),
            "gradient": ((mine - others).norm() / others.norm()).item(),
        }
        if case.differs is not None:
            row |= {"differs": case.differs, "plain": abs(own.item() / plain.item() - 1)}
        yield library, row


def advantages() -> Iterator[tuple[str, dict[str, Any]]]:
    """Advantages of NUM sequences in groups of GROUP against verl's. (TRL has no separate function for them.)"""
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos as verl

    generator = torch.Generator().manual_seed(2)
    reward = torch.randn(NUM, generator=generator, dtype=torch.float64) * 100  # so that divisors' epsilon is negligible
    mask = torch.ones(NUM, MOST, dtype=torch.float64)
    last = torch.zeros_like(mask)
    last[:, -1] = reward
    index, config = np.arange(NUM) // GROUP, AlgoConfig(gamma=1.0)
    all_tokens = NUM * MOST
    sample, tokens = (n / (n - 1) for n in (GROUP, all_tokens))
    over_tokens = "verl: over tokens, and of a sample; lengths are equal here"
    kinds: dict[str, tuple[AdvantageKind, Callable[[], Any], float, str | None]] = {
        "grpo": (
            "group_normalized",
            lambda: verl.compute_grpo_outcome_advantage(last, mask, index),
            sample**0.5,
            "verl: the deviation of a sample, sqrt(n / (n - 1))",
        ),
        "dr_grpo": (
            "group_mean",
            lambda: verl.compute_grpo_outcome_advantage(last, mask, index, norm_adv_by_std_in_grpo=False),
            1.0,
            None,
        ),
        "rloo": ("leave_one_out", lambda: verl.compute_rloo_outcome_advantage(last, mask, index), 1.0, None),
        "reinforce_plus_plus": (
            "batch_normalized",
            lambda: verl.compute_reinforce_plus_plus_outcome_advantage(last, mask, config),
            tokens**0.5,
            over_tokens,
        ),
        "reinforce_plus_plus_baseline": (
            "group_mean_normalized",
            lambda: verl.compute_reinforce_plus_plus_baseline_outcome_advantage(last, mask, index),
            tokens**0.5,
            over_tokens,
        ),
    }
    for name, (kind, theirs, factor, differs) in kinds.items():
        groups = [group.numpy() for group in reward.split(GROUP)]
        own = torch.from_numpy(np.concatenate(advantages_of(kind, groups, groups)))
        plain = theirs()[0][:, 0]
        row: dict[str, Any] = {"value": ((own - plain * factor).norm() / own.norm()).item()}
        if differs is not None:
            row |= {"differs": differs, "plain": ((own - plain).norm() / own.norm()).item()}
        yield name, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    import trl
    import verl

    of = drawn()
    losses = {name: dict(compared(name, case, of)) for name, case in cases().items()}
    found = {"losses": losses, "advantages": {name: {"verl": row} for name, row in advantages()}}
    rows = [(name, library, row) for part in found.values() for name, by in part.items() for library, row in by.items()]
    for name, library, row in rows:
        told = " ".join(f"{key} {row[key]:.1e}" for key in ("value", "gradient", "plain") if key in row)
        print(f"{name:30} {library:5} {told} {row.get('differs', '')}")
    if out is not None:
        releases = {"trl": trl.__version__, "verl": verl.__version__}
        out.write_text(json.dumps({**provenance(), "releases": releases, "wanted": WANTED, **found}, indent=1) + "\n")
    beyond = [
        f"{name} ({library})" for name, library, row in rows if max(row["value"], row.get("gradient", 0)) > WANTED
    ]
    if beyond:
        raise SystemExit(f"beyond {WANTED:g}: {', '.join(beyond)}")


if __name__ == "__main__":
    main()
