"""A peer's side of `benchmarks.peers`, run by the Python of the peer's environment, which has nothing of ours.

    python benchmarks/peers_in_trl.py peft|sft|grpo WORK.json

WORK.json has the model, rows and settings that both sides are given. The last line printed is JSON: the optimizer
steps with their losses, gradient norms and clocks, by transformers' own loop with PEFT, TRL's SFTTrainer with packing,
or TRL's GRPOTrainer.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed

Step = dict[str, float]
BETAS, EPS, CLIP = (0.9, 0.999), 1e-8, 1.0


def main() -> None:
    part, work = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(work["threads"])
    set_seed(work["seed"])
    base = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32, attn_implementation="sdpa")
    model = PeftModel.from_pretrained(base, work["adapter"], is_trainable=True)
    steps = {"peft": peft_steps, "sft": sft_steps, "grpo": grpo_steps}[part](model, work)
    print(json.dumps({"steps": steps}))


def peft_steps(model: Any, work: dict[str, Any]) -> list[Step]:
    """Steps over all rows, packed best fit into bins with positions that begin again: transformers' sign of packing."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=work["rate"], betas=BETAS, eps=EPS, weight_decay=0.0)
    bins = best_fit(work["rows"], work["bin_tokens"])
    num_targets = sum(len(row) - 1 for row in work["rows"])
    steps = []
    for _ in range(work["steps"]):
        total = 0.0
        for rows in bins:
            ids = torch.tensor([[token for row in rows for token in row]])
            positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
            labels = ids.masked_fill(positions == 0, -100)
            # With a cache it would not look for rows in a bin, and attend across them.
            batch = {"input_ids": ids, "position_ids": positions, "labels": labels, "use_cache": False}
            loss = model(**batch, num_items_in_batch=num_targets).loss
            loss.backward()
            total += float(loss)
        norm = float(torch.nn.utils.clip_grad_norm_(trained, CLIP))
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"loss": total, "grad_norm": norm, **clocks()})
    return steps


def best_fit(rows: list[list[int]], bin_tokens: int) -> list[list[list[int]]]:
    bins: list[list[list[int]]] = []
    for row in sorted(rows, key=len, reverse=True):
        fitting = [each for each in bins if sum(map(len, each)) + len(row) <= bin_tokens]
        if fitting:
            max(fitting, key=lambda each: sum(map(len, each))).append(row)
        else:
            bins.append([row])
    return bins


def clocks() -> Step:
    """Wall clock and CPU seconds of this process, at the end of a step."""
    return {"wall_s": time.perf_counter(), "cpu_s": time.process_time()}


class Steps(TrainerCallback):
    """The ends of a trainer's steps, with what it logs of each."""

    def __init__(self) -> None:
        self.told: list[Step] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.told.append(clocks())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.told[state.global_step - 1] |= {name: v for name, v in logs.items() if isinstance(v, int | float)}


def settings_of(work: dict[str, Any], accumulated: int) -> dict[str, Any]:
    """Arguments of both trainers: the same numbers as the other side, and no layers that are computed twice."""
    return {
        "output_dir": work["scratch"],
        "max_steps": work["steps"],
        "gradient_accumulation_steps": accumulated,
        "learning_rate": work["rate"],
        "lr_scheduler_type": "constant",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "weight_decay": 0.0,
        "max_grad_norm": CLIP,
        "seed": work["seed"],
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def sft_steps(model: Any, work: dict[str, Any]) -> list[Step]:
    from datasets import Dataset  # type: ignore[import-not-found]
    from trl import SFTConfig, SFTTrainer

    bins, told = best_fit(work["rows"], work["bin_tokens"]), Steps()
    config = SFTConfig(
        **settings_of(work, len(bins)),
        per_device_train_batch_size=1,
        max_length=work["bin_tokens"],
        packing=True,
    )
    rows = Dataset.from_list([{"input_ids": row} for row in work["rows"]])
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    trainer = SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer, callbacks=[told])
    assert len(trainer.train_dataset) == len(bins), "a step is one pass over all rows"
    trainer.train()
    return told.told


def grpo_steps(model: Any, work: dict[str, Any]) -> list[Step]:
    """Steps over all prompts. With `drawn` answers none are sampled: the update alone is made, on the given tokens."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    told, group, drawn = Steps(), work["group"], work["drawn"]
    config = GRPOConfig(
        **settings_of(work, len(work["prompts"])),
        per_device_train_batch_size=group,
        num_generations=group,
        max_completion_length=work["answer_tokens"],
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        epsilon_high=0.28,
        scale_rewards="none",
        shuffle_dataset=False,
    )

    def rewards(completions: list[Any], **_: Any) -> list[float]:
        return [each[0]["content"].count("e") / 8 for each in completions]

    def given(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        places = [work["prompts"].index(each[0]["content"]) for each in prompts]
        turns = [sum(before == place for before in places[:at]) for at, place in enumerate(places)]
        answers = [drawn[place]["answers"][turn] for place, turn in zip(places, turns, strict=True)]
        return {
            "prompt_ids": [drawn[place]["prompt"] for place in places],
            "completion_ids": [each["ids"] for each in answers],
            "logprobs": [each["logprobs"] for each in answers],
        }

    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    trainer = GRPOTrainer(
        model,
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": p}]} for p in work["prompts"]]),
        processing_class=tokenizer,
        callbacks=[told],
        rollout_func=given if drawn else None,
    )
    trainer.train()
    num_answers = len(work["prompts"]) * group
    return [step | {"drawn_tokens": step["completions/mean_length"] * num_answers} for step in told.told]


if __name__ == "__main__":
    main()
