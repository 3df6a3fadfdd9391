"""The card of a published adapter or model: its origin and measurements. The same run gives the same text."""

from collections.abc import Mapping

from activities.sources.http import shown_uri
from longshore.training import Full, Lora, SessionRun
from shared.jobs.losses import Preferences
from shared.runs.dataset_runs import DatasetRun, DistillRun, DPORun, RewardRun, SFTRun
from shared.runs.requests import RLRun, Run, dtype_of

# Suffixes of metrics that are left out: they depend on the machine, and equal runs shall have equal cards.
_NOT_OF_THE_MODEL = ("_s", "_bytes", "_per_s")
_METHODS = {
    "sft": "Supervised fine-tuning",
    "dpo": "Direct preference optimisation (DPO)",
    "distill": "Distillation",
    "reward": "A reward model",
    "rl": "Reinforcement learning",
    "session": "A session",
}
REGISTERING = """\
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

register_checkpoint_conversion_mapping("qwen3_5_moe", get_checkpoint_conversion_mapping("qwen2_moe"))
"""
_IN_PEFT = f"""## Loading with PEFT

PEFT 0.21 leaves out experts' adapters beside a model that reads images, unless this is said before:

```python
{REGISTERING}```
"""
_SENT = {"rl": "trajectories that a client sent", "session": "commands that a client sent"}


def model_card(
    run: Run, metrics: Mapping[str, float], report: Mapping[str, object], adapter: Mapping[str, object]
) -> str:
    """README.md, with the front matter that hubs read. It has no dates, versions or timings.

    `adapter`: the content of its `adapter_config.json`, if it has one.
    """
    data = _SENT[run.kind] if isinstance(run, RLRun | SessionRun) else f"`{shown_uri(run.dataset.uri)}`"
    method = _METHODS[run.kind]
    if isinstance(run, DPORun) and run.objective != "sigmoid":
        method = f"Preference optimisation ({run.objective})"
    kind = "LoRA adapter" if run.trainable.kind == "lora" else "Fully fine-tuned model"
    library = "peft" if run.trainable.kind == "lora" else "transformers"
    return "\n".join(
        [
            "---",
            f"base_model: {run.model}",
            f"library_name: {library}",
            f"tags: [longshore, {run.kind}]",
            "---",
            f"# {kind} of {run.model}",
            "",
            f"{method} by Longshore on {data}.",
            "",
            *([_IN_PEFT] if {"exclude_modules", "target_parameters"} <= adapter.keys() else []),
            "## Metrics",
            *_table({n: f"{v:.6g}" for n, v in metrics.items() if not n.endswith(_NOT_OF_THE_MODEL)}),
            "## Training",
            *_table(_hyperparameters(run)),
            "## Data",
            *_table({name: str(value) for name, value in report.items() if isinstance(value, int | float)}),
        ]
    )


def _hyperparameters(run: Run) -> dict[str, str]:
    match run.trainable:
        case Lora() as lora:
            given = lora.model_dump(exclude={"kind", "targets"}, exclude_defaults=True)
            shown = {"rank": lora.rank, "alpha": f"{lora.alpha:g}", "targets": ", ".join(lora.targets)} | given
            method = {f"LoRA {name.replace('_', ' ')}": str(value) for name, value in shown.items()}
        case Full():
            method = {"trained": "all weights"}
    fixed = {"dtype": dtype_of(run), "seed": str(run.seed)}
    if isinstance(run, SessionRun):  # its client sets the other hyperparameters at each step
        return {**method, **fixed}
    own = _of_reinforcement(run) if run.kind == "rl" else _of_dataset(run)
    chosen = ("optimizer", "decay", "lora_plus_ratio")  # shown if they are not the defaults
    own |= {n.replace("_", " "): str(v) for n, v in run.model_dump(include={*chosen}, exclude_defaults=True).items()}
    return {**method, **own, "weight decay": f"{run.weight_decay:g}", "clip norm": f"{run.clip_norm:g}", **fixed}


def _of_dataset(run: DatasetRun) -> dict[str, str]:
    match run:
        case SFTRun():
            own = {}
        case DPORun():
            reference = run.reference or run.initial_adapter or "base"
            named = "the base model" if reference == "base" else f"`{shown_uri(reference)}`"
            fields = run.model_dump(include=set(Preferences.model_fields), exclude_defaults=True)
            own = {name.replace("_", " "): str(value) for name, value in fields.items()} | {
                "beta": f"{run.beta:g}",
                "label smoothing": f"{run.label_smoothing:g}",
                "reference": named if run.has_reference else "none",
            }
        case RewardRun():
            own = {"objective": run.objective, "rewards": ", ".join(run.head.names), "center": f"{run.center:g}"}
        case DistillRun():
            own = {
                "teacher": "the base model" if run.teacher == "base" else f"`{shown_uri(run.teacher)}`",
                **{
                    f"teacher {name}": "the base model" if u == "base" else f"`{shown_uri(u)}`"
                    for name, u in run.teachers
                },
                "divergence": run.divergence + (f", skew {run.skew:g}" if run.skew is not None else ""),
                "compared": f"top {run.top_k}" if run.top_k else run.tokens,
                "temperature": f"{run.temperature:g}",
            }
    return own | {
        "length": f"{run.epochs:g} epochs" if run.epochs is not None else f"{run.steps} steps",
        "batch": f"{run.batch_size} examples" if run.batch_size is not None else f"{run.batch_tokens} tokens",
        "longest example": f"{run.max_tokens} tokens",
        "learning rate": f"{run.learning_rate:g}, {run.schedule}, {run.warmup_steps} warm-up steps",
    }


def _of_reinforcement(run: RLRun) -> dict[str, str]:
    return {
        "loss": run.loss.model_dump_json(exclude_none=True),
        "advantages": run.advantages.replace("_", " "),
        "optimizer steps": f"{run.epochs} x {run.mini_batches} a train step",
        "longest trajectory": f"{run.max_tokens} tokens",
        "learning rate": f"{run.learning_rate:g}, {run.schedule}, {run.warmup_steps} warm-up steps",
    }


def _table(rows: Mapping[str, str]) -> list[str]:
    return ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in sorted(rows.items())), ""]
