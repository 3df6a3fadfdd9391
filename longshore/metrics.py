"""Every metric of a run: its name and unit, what it is, and how a train step combines those of its optimizer steps.

`python -m benchmarks.pages` writes the tables of docs/metrics.md. Tests hold what jobs and steps report to them.
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
    Metric("loss_*", "the loss's", "of a mixture's source: its weighted mean over the source's own; none without any"),
    Metric("tokens_*", "tokens", "of a mixture's source", "sum"),
    Metric("target_tokens_*", "tokens", "of a mixture's source", "sum"),
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
    Metric("group_lag_mean", "steps", "with `carry_over`: trained since the policy was made that a prompt began with"),
    Metric("group_lag_max", "steps", "the largest of these"),
    Metric("carried_groups", "groups", "of this step's prompts and earlier ones that are left for later steps"),
    Metric("samplers", "samplers", "that drew the step's samples, if there may be several"),
    Metric("sampling_seconds", "s", "until all samples were drawn"),
    Metric("grading_seconds", "s", "until all were graded"),
    Metric("training_seconds", "s", "of the step's job, with its wait for a worker"),
    Metric("publishing_seconds", "s", "until the policy was published and samplers had it"),
    Metric("evaluating_seconds", "s", "of the held-out prompts"),
    Metric("sync_bytes", "bytes", "that the weight sync sent to each sampler"),
    Metric("sync_blocked_s", "s", "that the trainer waited for it"),
    Metric("sync_s", "s", "until the last sampler had the weights"),
    Metric("sync_made_room", "share", "1 if the optimizer's state left a device that was short of memory for it"),
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
TABLES = (_STEP, _POLICY, _PREFERENCES, _GROUPS, _ROLLOUTS, _EVALUATIONS)
COMBINED = (_STEP, _POLICY)
"""Those whose metrics are measured of each optimizer step."""
METRICS: Mapping[str, Metric] = {metric.name: metric for metrics in TABLES for metric in metrics}
