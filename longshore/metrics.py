"""Every metric of a run: its name and unit, what it is, and how a train step combines those of its optimizer steps.

`python -m longshore.metrics > docs/metrics.md` writes the page. Tests hold what jobs and steps report to this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Combined = Literal["last", "sum", "max", "mean", "mean_of_tokens"]
"""How values of several optimizer steps become one: `mean_of_tokens` is weighted by each step's `target_tokens`."""


@dataclass(frozen=True)
class Metric:
    """A metric. A name that ends in `*` stands for all names that begin so.

    Attributes:
        means: what it is, with its formula; in Markdown.
        combined: by a train step of several optimizer steps. Not read for what is measured once a train step.
    """

    name: str
    unit: str
    means: str
    combined: Combined = "mean"


def metric_of(name: str) -> Metric | None:
    """Return what defines a metric's name; None if nothing does."""
    parts = name.split("_")
    begins = ("_".join([*parts[:end], "*"]) for end in range(len(parts) - 1, 0, -1))
    return METRICS.get(name) or next((METRICS[each] for each in begins if each in METRICS), None)


def is_of_the_machine(name: str) -> bool:
    """Return True for seconds, bytes and rates, which differ between equal runs."""
    found = metric_of(name)
    return found is not None and found.unit in ("s", "bytes", "tokens/s")


def combined_by(name: str) -> Combined:
    """Return how a train step combines a metric of its optimizer steps."""
    found = metric_of(name)
    return "mean" if found is None else found.combined


# --- The tables, by who measures them ---

_STEP = (
    Metric("loss", "the loss's", "its weighted mean over the trained tokens (pairs, answers) of all ranks"),
    Metric("nll", "nats", "-log p of the targets, weighted mean, if the loss is another one"),
    Metric("grad_norm", "1", "the gradient's norm before clipping"),
    Metric("clipped", "share", "1 if the gradient was clipped"),
    Metric("learning_rate", "1", "of the step", "last"),
    Metric("skipped", "steps", "1 for a step whose weights add up to 0: nothing is updated", "sum"),
    Metric("tokens", "tokens", "that went through the model; a shared prefix counts once", "sum"),
    Metric("target_tokens", "tokens", "that were trained: targets with a weight other than 0", "sum"),
    Metric("tokens_*", "tokens", "of a mixture's source", "sum"),
    Metric("examples_*", "examples", "of a mixture's source", "sum"),
    Metric("sequences", "sequences", "with a target", "sum"),
    Metric("num_bins", "bins", "packed bins that are not empty", "sum"),
    Metric("step_s", "s", "of the optimizer step, on rank 0", "sum"),
    Metric("tokens_per_s", "tokens/s", "`tokens` / `step_s`"),
    Metric("memory_bytes", "bytes", "allocated on the device, of the fullest rank", "max"),
    Metric("recomputed", "share", "1 if layers are computed again in the backward pass"),
    Metric("grad_noise_trace", "1", "tr S of the [noise scale](optimizers.md#gradient-noise-scale)"),
    Metric("grad_signal", "1", "its \\|G\\|²"),
    Metric("grad_noise_scale", "weights", "their quotient, if \\|G\\|² is positive"),
)
_POLICY = (
    Metric("ratio_mean", "1", "r = p / p_old; s of `gspo`. 1 on policy", "mean_of_tokens"),
    Metric("ratio_max", "1", "the largest", "max"),
    Metric("clip_high_fraction", "share", "of tokens that the upper bound holds", "mean_of_tokens"),
    Metric("clip_low_fraction", "share", "of tokens that the lower bound holds", "mean_of_tokens"),
    Metric("clip_dual_fraction", "share", "of tokens that `dual_clip` holds", "mean_of_tokens"),
    Metric(
        "kl_old_new",
        "nats",
        "k3 of the old policy against the trained one: how far the job has moved",
        "mean_of_tokens",
    ),
    Metric(
        "kl_sampler_trainer",
        "nats",
        "k3 of the sampler against the trainer: numbers that differ, or staleness",
        "mean_of_tokens",
    ),
    Metric("kl_reference", "nats", "k3 against the reference, whatever estimator the loss uses", "mean_of_tokens"),
    Metric("entropy", "nats", "of the trained policy", "mean_of_tokens"),
    Metric("importance_mean", "1", "p_old / p_sampler, with `truncated_importance`", "mean_of_tokens"),
    Metric("truncated_fraction", "share", "of tokens whose importance is beyond its bound", "mean_of_tokens"),
    Metric("off_policy_fraction", "share", "of tokens that `off_policy_bound` masks out", "mean_of_tokens"),
    Metric("critic_loss", "units²", "½ (V - R)², clipped"),
    Metric("critic_grad_norm", "1", "as `grad_norm`"),
    Metric("critic_learning_rate", "1", "as `learning_rate`", "last"),
    Metric("critic_clipped_fraction", "share", "of values that `clip` holds", "mean_of_tokens"),
    Metric("critic_memory_bytes", "bytes", "as `memory_bytes`, while the critic is trained", "max"),
    Metric("value_mean", "reward", "V of the job's data, before its first step"),
    Metric("return_mean", "reward", "R of the same"),
    Metric("advantage_std", "reward", "deviation of A"),
    Metric("explained_variance", "1", "1 - Var(G - V) / Var(G)"),
)
_PREFERENCES = (
    Metric("reward_chosen", "nats", "β log(p / p_ref) of chosen answers; a reward model's r⁺"),
    Metric("reward_rejected", "nats", "of rejected ones"),
    Metric("reward_margin", "nats", "their difference"),
    Metric("preference_accuracy", "share", "of pairs in which the chosen answer has more"),
    Metric("label_accuracy", "share", "`kto`: of answers on the right side of z"),
    Metric("nll_chosen", "nats", "-log p of chosen answers' tokens, with `rpo_alpha` and `orpo`"),
    Metric("kl", "nats", "`kto`: z"),
    Metric("calibration_error", "share", "a reward model's expected calibration error, in ten bins"),
)
_GROUPS = (
    Metric("reward_mean", "reward", "over all trajectories with a reward, dropped ones too"),
    Metric("reward_mean_*", "reward", "over the samples of a mixture's source"),
    Metric("reward_std", "reward", "over the same as `reward_mean`"),
    Metric("reward_spread_mean", "reward", "mean of the groups' own deviations"),
    Metric("zero_variance_share", "share", "of groups whose rewards are all equal"),
    Metric("groups", "groups", "that came"),
    Metric("trained_groups", "groups", "that were trained"),
    Metric("redrawn_groups", "groups", "of equal grades that were sampled again"),
    Metric("trajectories", "trajectories", "that came"),
    Metric("trained_trajectories", "trajectories", "that were trained"),
    Metric("dropped_trajectories", "trajectories", "that were not, for whatever reason"),
    Metric("broken_trajectories", "trajectories", "that break a rule"),
    Metric("dropped_for_*", "trajectories", "of those, by rule"),
    Metric("episode_branches", "sequences", "of episodes: one for each branch of a conversation"),
    Metric("remembered_turns", "turns", "of conversations whose ids are those that our sampler drew"),
    Metric("rendered_turns", "turns", "whose ids were made by the template"),
    Metric("prompt_tokens", "tokens", "that were not sampled: prompts, tool results; a shared prefix counts each time"),
    Metric("response_tokens", "tokens", "that were sampled"),
    Metric("response_tokens_mean", "tokens", "sampled, a trajectory"),
    Metric("response_tokens_max", "tokens", "the longest"),
    Metric("truncation_rate", "share", "of trajectories whose last answer was cut off by its limit"),
    Metric("staleness_mean", "versions", "the trained policy's version minus that which drew a token"),
    Metric("staleness_max", "versions", "the largest"),
    Metric("stale_token_share", "share", "of sampled tokens that an older policy drew"),
    Metric("packing_factor", "1", "tokens of the trained sequences, over tokens after shared prefixes are merged"),
    Metric("trajectory_*", "the sender's", "mean of a metric that trajectories or graders bring"),
)
_ROLLOUTS = (
    Metric("prompts_*", "prompts", "of a mixture's source"),
    Metric("samples", "samples", "that were drawn"),
    Metric("ungraded_share", "share", "of samples without a grade, which are dropped"),
    Metric("failed_groups", "groups", "with an episode whose environment broke, which are dropped whole"),
    Metric("episode_turns_mean", "turns", "an episode"),
    Metric("episode_kept_share", "share", "of later turns whose prompts begin with the ids that were drawn before"),
    Metric("episode_end_*", "share", "of episodes that ended for this [reason](agents.md#environments)"),
    Metric("samplers", "samplers", "that drew the step's samples, if there may be several"),
    Metric("sampling_seconds", "s", "until all samples were drawn"),
    Metric("grading_seconds", "s", "until all were graded"),
    Metric("training_seconds", "s", "of the step's job, with its wait for a worker"),
    Metric("publishing_seconds", "s", "until the policy was published and samplers had it"),
    Metric("evaluating_seconds", "s", "of the held-out prompts"),
    Metric("sync_bytes", "bytes", "that the weight sync sent to each sampler"),
    Metric("sync_blocked_s", "s", "that the trainer waited for it"),
    Metric("sync_s", "s", "until the last sampler had the weights"),
    Metric("sync_failed", "samplers", "that did not get them; they load from the store"),
    Metric("sync_used", "share", "1 if every sampler serves the weights that were sent"),
    Metric("sync_reloaded", "samplers", "that failed the proof and loaded the policy anew"),
    Metric("sync_given_up", "samplers", "that failed it again"),
    Metric(
        "probe_difference_max", "nats", "largest difference of sampler and trainer on the probe's log-probabilities"
    ),
)
_EVALUATIONS = (
    Metric("eval_*", "its", "a metric of held-out rows; with `eval_datasets`, `eval_NAME_…` of each set"),
    Metric("eval_loss", "the loss's", "`cross_entropy`, whatever is trained; for preferences their own"),
    Metric("eval_perplexity", "1", "exp of the mean -log p"),
    Metric("eval_reward_mean", "reward", "of samples of held-out prompts"),
    Metric("eval_reward_std", "reward", "over the same"),
    Metric("eval_response_tokens_mean", "tokens", "a sample"),
    Metric("eval_truncation_rate", "share", "of samples that were cut off by their limit"),
    Metric("eval_samples", "samples", "that were drawn"),
    Metric("eval_ungraded", "samples", "without a grade"),
    Metric("best_step", "step", "whose evaluation was best, with `keep: best`"),
    Metric("best_*", "its", "the value of that metric there"),
)
_TABLES = {
    "Optimizer steps": (_STEP, "Measured by the worker, whatever the loss."),
    "Policy losses and critics": (_POLICY, "Weighted means over the trained tokens of all ranks and bins."),
    "Preferences and reward models": (_PREFERENCES, "Means over pairs or answers."),
    "Groups of a train step": (_GROUPS, "Counted before the step is trained (`pack_trajectories`)."),
    "Rollouts and weight sync": (_ROLLOUTS, "Measured by the run's workflow; a local run has no seconds."),
    "Evaluations": (_EVALUATIONS, "Held-out rows are evaluated by the worker, held-out prompts by samplers."),
}
_SYSTEMS = ("ART", "verl", "TRL")
_ELSEWHERE = {
    "loss": ("loss/train", "actor/pg_loss", "loss"),
    "grad_norm": ("loss/grad_norm", "actor/grad_norm", "grad_norm"),
    "learning_rate": ("loss/learning_rate", "actor/lr", "learning_rate"),
    "tokens": ("data/step_non_padding_train_tokens", "", ""),
    "target_tokens": ("data/step_trainable_assistant_tokens", "", ""),
    "sequences": ("data/step_num_datums", "", ""),
    "step_s": ("", "", "step_time"),
    "tokens_per_s": ("", "perf/throughput (of one device)", ""),
    "memory_bytes": ("", "perf/max_memory_allocated_gb", ""),
    "ratio_mean": ("loss/policy_ratio_mean", "", ""),
    "ratio_max": ("loss/policy_ratio_max", "", ""),
    "clip_high_fraction": ("", "actor/pg_clipfrac (both bounds)", "clip_ratio/high_mean"),
    "clip_low_fraction": ("", "", "clip_ratio/low_mean"),
    "clip_dual_fraction": ("", "actor/pg_clipfrac_lower", ""),
    "kl_old_new": ("", "actor/ppo_kl (k1)", ""),
    "kl_sampler_trainer": ("", "rollout_corr/k3_kl", ""),
    "kl_reference": ("loss/kl_policy_ref", "actor/kl_loss", "kl"),
    "entropy": ("loss/entropy", "actor/entropy", "entropy"),
    "importance_mean": ("", "", "sampling/importance_sampling_ratio/mean"),
    "critic_loss": ("", "critic/vf_loss", ""),
    "critic_grad_norm": ("", "critic/grad_norm", ""),
    "critic_learning_rate": ("", "critic/lr", ""),
    "critic_clipped_fraction": ("", "critic/vf_clipfrac", ""),
    "value_mean": ("", "critic/values/mean", ""),
    "return_mean": ("", "critic/returns/mean", ""),
    "explained_variance": ("", "critic/vf_explained_var", ""),
    "reward_chosen": ("", "", "rewards/chosen"),
    "reward_rejected": ("", "", "rewards/rejected"),
    "reward_margin": ("", "", "rewards/margins"),
    "preference_accuracy": ("", "", "rewards/accuracies"),
    "kl": ("", "", "kl"),
    "reward_mean": ("reward", "critic/score/mean", "reward"),
    "reward_std": ("", "", "reward_std (of `batch`)"),
    "reward_spread_mean": ("reward_std_dev", "", "reward_std (of `group`)"),
    "zero_variance_share": ("", "", "frac_reward_zero_std"),
    "groups": ("data/step_num_groups_submitted", "", ""),
    "trained_groups": ("data/step_num_groups_trainable", "", ""),
    "trajectories": ("data/step_num_trajectories", "", ""),
    "response_tokens_mean": ("", "response_length/mean", "completions/mean_length"),
    "response_tokens_max": ("", "response_length/max", "completions/max_length"),
    "truncation_rate": ("", "response_length/clip_ratio", "completions/clipped_ratio"),
    "sampling_seconds": ("time/step_collect_batch_s", "timing_s/gen", ""),
    "grading_seconds": ("", "timing_s/reward", ""),
    "training_seconds": ("", "timing_s/update_actor", ""),
    "evaluating_seconds": ("", "timing_s/testing", ""),
    "eval_loss": ("", "", "eval_loss"),
    "eval_reward_mean": ("val/reward", "val-core/…/mean@N", "eval_reward"),
    "eval_response_tokens_mean": ("", "", "eval_completions/mean_length"),
    "eval_truncation_rate": ("", "", "eval_completions/clipped_ratio"),
}
METRICS: Mapping[str, Metric] = {metric.name: metric for metrics, _ in _TABLES.values() for metric in metrics}


# --- The page ---

_INTRODUCTION = """# Metrics

Written by `python -m longshore.metrics > docs/metrics.md`. All metrics of a run are in its log and in `longshore
metrics RUN`. W&B has them as `train/NAME`, `eval/NAME`, of a train step of reinforcement learning `rollout/NAME`, and
`system/NAME` for seconds, bytes and rates. A train step combines the metrics of its optimizer steps as the last column
says. [losses.md](losses.md) has the formulas of the losses: p is a token's probability under the trained policy, p_old
under the policy at the job's start, p_ref under the reference, p_sampler under the sampler that drew it. k3 of p
against q is r - 1 - log r with r = q / p. A name with `*` stands for several.
"""


def _page() -> str:
    parts = [_INTRODUCTION]
    for title, (metrics, said) in _TABLES.items():
        is_combined = metrics in (_STEP, _POLICY)
        rows = [["metric", "unit", "is", *(["combined by"] if is_combined else [])]]
        rows.append(["---"] * len(rows[0]))
        for metric in metrics:
            how = [metric.combined.replace("_", " ")] if is_combined else []
            rows.append([f"`{metric.name}`", metric.unit, metric.means, *how])
        parts.append(f"## {title}\n\n{said}\n\n{_table(rows)}")
    others = [["here", *_SYSTEMS], ["---"] * (1 + len(_SYSTEMS))]
    others += [[f"`{name}`", *names] for name, names in _ELSEWHERE.items()]
    said = "The same quantity under the names that ART 0.5, verl 0.9 and TRL 1.x log. Empty: we know of none."
    parts.append(f"## Elsewhere\n\n{said}\n\n{_table(others)}")
    return "\n".join(parts)


def _table(rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


if __name__ == "__main__":
    print(_page(), end="")
