"""A real pretrained model, trained by SFT and RL on a stack; for comparison, SFT by transformers and PEFT.

    python -m benchmarks.real_model [--rows FOLDER] [--parts sft rl episodes] [--seeds 0 1] [--folder F] [--out FILE]

The model is SmolLM2-135M-Instruct (examples/real_model.py), in float32.

sft: LoRA 16 for 20 steps of 8 questions of GSM8K; the loss on 64 held-out ones before, after 10 and after 20 steps.
Both columns begin with the same adapter, made by PEFT, and have the same rows in the order of the run's plan.
Transformers renders and tokenizes by itself. `in_peft`: the adapter that the run published, loaded by PEFT.

rl: GRPO on capitals. An answer is right if it contains the name; the reward is the share of right answers, drawn at
temperature 1, to questions on held-out countries. Each seed has two runs: a normal one, and one whose rewards are
shuffled within their groups, which must not learn.

episodes: the same questions in an environment. It says if an answer is wrong, and the policy has three tries, worth 1,
1/2 and 1/3.

Finished parts and the stack are kept in the folder: a repeated call continues from there.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.control_plane import LONGSHORE, stack
from benchmarks.machine import provenance, tell
from examples.real_model import Unreachable, make_real_model
from longshore.grading import StringCheckGrader
from longshore.training import DELTA_NET, LINEARS, Adam
from shared.jobs.job import Job, JobPlan
from shared.jobs.packed import Plan
from shared.storage.paths import RunKeys

ROOT = Path(__file__).parents[1]
_PARTS = ["sft", "rl", "episodes"]
STEPS, BATCH, HELD_OUT, RATE = 20, 8, 64, 2e-4
TARGETS = [name for name in LINEARS if name not in DELTA_NET]
SFT_RUN = [
    *("--steps", str(STEPS), "--batch-size", str(BATCH), "--eval-every", "10", "--schedule", "constant"),
    *("--lr", str(RATE), "--lora-rank", "16", "--lora-alpha", "32", "--lora-targets", ",".join(TARGETS)),
    *("--max-tokens", "1024", "--bin-tokens", "1024", "--checkpoint-every", str(STEPS), "--dtype", "float32"),
    *("--prompt-field", "question", "--completion-field", "answer"),
]
RL_RUN = [
    *("--algorithm", "grpo", "--steps", "10", "--prompts-per-step", "8", "--group-size", "8", "--mini-batches", "2"),
    *("--lr", "2e-4", "--lora-rank", "16", "--lora-alpha", "32", "--max-completion-tokens", "12", "--eval-every", "5"),
    *("--eval-samples", "4", "--eval-temperature", "1", "--max-tokens", "128", "--bin-tokens", "1024"),
    *("--publish-every", "10", "--dtype", "float32"),
]
GRADER = StringCheckGrader(
    name="names the capital", operation="like", input="{{ sample.output_text }}", reference="{{ item.answer }}"
)
ENVIRONMENT = """
class Environment:
    def reset(self, item, seed):
        self.answer, self.tries = item["answer"], 0

    def step(self, answer):
        self.tries += 1
        if self.answer in answer["content"]:
            return {"reward": 1 / self.tries, "done": True}
        return {"observation": "No. Which city is it?", "reward": 0, "done": self.tries == 3}
"""
CAPITALS = """
Afghanistan Kabul, Albania Tirana, Algeria Algiers, Argentina Buenos Aires, Armenia Yerevan, Australia Canberra,
Austria Vienna, Azerbaijan Baku, Bangladesh Dhaka, Belgium Brussels, Bulgaria Sofia, Canada Ottawa, Chile Santiago,
China Beijing, Colombia Bogota, Croatia Zagreb, Cuba Havana, Denmark Copenhagen, Ecuador Quito, Egypt Cairo,
Ethiopia Addis Ababa, Finland Helsinki, France Paris, Georgia Tbilisi, Germany Berlin, Ghana Accra, Greece Athens,
Hungary Budapest, Iceland Reykjavik, India Delhi, Indonesia Jakarta, Iran Tehran, Iraq Baghdad, Ireland Dublin,
Israel Jerusalem, Italy Rome, Jamaica Kingston, Japan Tokyo, Jordan Amman, Kenya Nairobi, Laos Vientiane, Latvia Riga,
Lebanon Beirut, Libya Tripoli, Lithuania Vilnius, Malaysia Kuala Lumpur, Mali Bamako, Mongolia Ulaanbaatar,
Morocco Rabat, Nepal Kathmandu, Nigeria Abuja, Norway Oslo, Pakistan Islamabad, Peru Lima, Poland Warsaw,
Portugal Lisbon, Romania Bucharest, Russia Moscow, Rwanda Kigali, Senegal Dakar, Serbia Belgrade, Somalia Mogadishu,
Spain Madrid, Sudan Khartoum, Sweden Stockholm, Syria Damascus, Thailand Bangkok, Tunisia Tunis, Turkey Ankara,
Uganda Kampala, Ukraine Kyiv, Uruguay Montevideo, Venezuela Caracas, Vietnam Hanoi, Zambia Lusaka, Zimbabwe Harare
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROOT.parent / "shared" / "data" / "gsm8k")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of whatever computes")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv" / "real_model_benchmark")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if "sft" in options.parts and not (options.rows / "train.jsonl").exists():
        sys.exit(f"{options.rows} lacks train.jsonl and test.jsonl of GSM8K (github.com/openai/grade-school-math)")
    try:
        model = make_real_model()
    except Unreachable as error:
        sys.exit(str(error))
    options.folder.mkdir(parents=True, exist_ok=True)
    settings = {"LONGSHORE_CPU_THREADS": str(options.threads), "LONGSHORE_WORKER_IDLE_S": "120"}
    parts = Parts(options.folder / "parts.json")
    with stack((options.folder / "stack").resolve(), **settings):
        runs = Runs((options.folder / "stack").resolve())
        if "sft" in options.parts:
            fine_tune(model, options.rows, options.folder.resolve(), options.threads, runs, parts)
        write_capitals(folder := options.folder.resolve())
        if "rl" in options.parts:
            reinforce("rl", ["--grader", GRADER.model_dump_json()], model, folder, options.seeds, runs, parts)
        if "episodes" in options.parts:
            (folder / "environment.py").write_text(ENVIRONMENT)
            own = ["--environment", str(folder / "environment.py"), "--max-turns", "3"]
            reinforce("episodes", own, model, folder, options.seeds, runs, parts)
    result = {"benchmark": "real_model", "threads": options.threads, **parts.done, **provenance()}
    tell(result, options.out)


class Parts:
    """The figures that are done, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, name: str, figures: Any) -> None:
        self.done[name] = figures
        self._path.write_text(json.dumps(self.done, indent=1))
        print(name, json.dumps(figures), flush=True)


class Runs:
    """Runs on this benchmark's stack, by the command line."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def cli(self, *arguments: str) -> Any:
        """Run a command to its end. Returns its JSON document."""
        environment = {**os.environ, "LONGSHORE_ROOT": str(self._root)}
        command = [LONGSHORE, *arguments]
        done = subprocess.run([*command, "--json"], env=environment, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout)

    def submit(self, key: str, *options: str) -> dict[str, Any]:
        """Follow a run to its end; one that was begun before, by its key."""
        answer: dict[str, Any] = self.cli("submit", *options, "--wait", "--idempotency-key", key)
        return answer

    def order(self, run_id: str) -> list[list[int]]:
        """Return the rows of each step of a run of fine-tuning, by number."""
        store = self._root / "store"
        [job] = (store / RunKeys(run_id).prefix / "logs").rglob("job.json")
        plan = Job.model_validate_json(job.read_bytes()).plan
        assert isinstance(plan, JobPlan)
        read = Plan(Path(plan.data.plan.uri.removeprefix("file://")))
        return [[int(row) for units in read.bins(step) for row in units] for step in range(read.header.num_steps)]


def fine_tune(model: Path, rows: Path, folder: Path, threads: int, runs: Runs, parts: Parts) -> None:
    """Both columns of fine-tuning."""
    train = (rows / "train.jsonl").read_text().splitlines()[: STEPS * BATCH]
    held_out = (rows / "test.jsonl").read_text().splitlines()[:HELD_OUT]
    for name, lines in (("train", train), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    reference = Reference(model, threads)
    fresh = reference.fresh_adapter(folder / "fresh_adapter")
    if "sft" not in parts.done:
        data = ["--dataset", str(folder / "train.jsonl"), "--eval-dataset", str(folder / "held_out.jsonl")]
        run = runs.submit(
            "sft", "sft", "--model", str(model), "--initial-adapter", fresh.as_uri(), *data, *SFT_RUN, "--name", "gsm8k"
        )
        metrics = runs.cli("metrics", run["run_id"])
        losses = {row["step"]: round(row["metrics"]["loss"], 5) for row in metrics["evaluations"]}
        parts.add("sft", {"run_id": run["run_id"], "adapter": run["adapter"], "held_out": losses})
    if "sft_in_transformers" not in parts.done:
        asked = [reference.tokens(json.loads(line)) for line in held_out]
        counts = {"tokens": sum(len(ids) for ids, _ in asked), "targets": sum(num for _, num in asked)}
        order = runs.order(parts.done["sft"]["run_id"])
        steps = [[reference.tokens(json.loads(train[row])) for row in step] for step in order]
        parts.add("sft_in_transformers", {"held_out": dict(reference.train(fresh, steps, asked)), **counts})
    if "in_peft" not in parts.done:
        adapter = Path(parts.done["sft"]["adapter"].removeprefix("file://"))
        asked = [reference.tokens(json.loads(line)) for line in held_out]
        parts.add("in_peft", round(reference.loss(reference.with_adapter(adapter), asked), 5))


Row = tuple[list[int], int]
"""A conversation's token ids up to the end of its last turn, and how many of the last are trained."""


class Reference:
    """The same by transformers and PEFT."""

    def __init__(self, model: Path, threads: int) -> None:
        import torch
        from transformers import AutoTokenizer

        torch.set_num_threads(threads)
        self._model = model
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def _base(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32)

    def fresh_adapter(self, folder: Path) -> Path:
        import torch
        from peft import LoraConfig, get_peft_model

        if not folder.exists():
            torch.manual_seed(0)
            config = LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
            get_peft_model(self._base(), config).save_pretrained(folder)
        return folder

    def with_adapter(self, adapter: Path) -> Any:
        from peft import PeftModel

        return PeftModel.from_pretrained(self._base(), adapter, is_trainable=True)

    def tokens(self, row: dict[str, str]) -> Row:
        """Render by the model's chat template. The tokens after the prompt are trained, up to the end of the turn."""
        asked = [{"role": "user", "content": row["question"]}]
        render = self._tokenizer.apply_chat_template
        prompt = render(asked, tokenize=True, add_generation_prompt=True, return_dict=False)
        whole = render([*asked, {"role": "assistant", "content": row["answer"]}], tokenize=True, return_dict=False)
        assert whole[: len(prompt)] == prompt
        end = len(whole) - whole[::-1].index(self._tokenizer.eos_token_id)  # behind it there is a line's end
        return whole[:end], end - len(prompt)

    def train(self, adapter: Path, steps: list[list[Row]], held_out: list[Row]) -> Iterator[tuple[int, float]]:
        """Train an adapter by steps of these rows. Yields how many are done, with the loss on held-out rows."""
        import torch

        model, adam = self.with_adapter(adapter), Adam()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=0.0)
        yield 0, round(self.loss(model, held_out), 5)
        for number, rows in enumerate(steps, 1):
            num_targets = sum(num for _, num in rows)
            for row in rows:
                (self._sum(model, row) / num_targets).backward()
            torch.nn.utils.clip_grad_norm_(trained, adam.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            if number % 10 == 0:
                yield number, round(self.loss(model, held_out), 5)

    def loss(self, model: Any, rows: list[Row]) -> float:
        import torch

        with torch.no_grad():
            return sum(float(self._sum(model, row)) for row in rows) / sum(num for _, num in rows)

    def _sum(self, model: Any, row: Row) -> Any:
        """Return the summed loss of a row's targets."""
        import torch

        ids, num_targets = row
        ids_1L = torch.tensor([ids])
        logits_LV = model(input_ids=ids_1L).logits[0, -1 - num_targets : -1]
        return torch.nn.functional.cross_entropy(logits_LV, ids_1L[0, -num_targets:], reduction="sum")


def reinforce(part: str, own: list[str], model: Path, folder: Path, seeds: list[int], runs: Runs, parts: Parts) -> None:
    """GRPO with true rewards and with shuffled ones, for each seed. `own`: the part's options."""
    data = ["--prompts", str(folder / "capitals_train.jsonl"), "--eval-prompts", str(folder / "capitals_eval.jsonl")]
    options = ["rl", "--model", str(model), *data, *own, *RL_RUN]
    for seed in seeds:
        for shuffled in (False, True):
            name = f"{part}_seed_{seed}" + "_shuffled" * shuffled
            if name in parts.done:
                continue
            run = runs.submit(name, *options, "--seed", str(seed), *["--shuffle-rewards"] * shuffled)
            metrics = [step["metrics"] for step in runs.cli("steps", run["run_id"])]
            kept = min(_column(metrics, "episode_kept_share"), default=None)
            figures = {
                "seed": seed,
                "shuffled": shuffled,
                "held_out": _column(metrics, "eval_reward_mean"),
                "sampled": _column(metrics, "reward_mean"),
                "probe": max(each.get("probe_difference_max", 0.0) for each in metrics),
                **({"turns": turns, "kept": kept} if (turns := _column(metrics, "episode_turns_mean")) else {}),
            }
            parts.add(name, figures)


def _column(metrics: list[dict[str, float]], name: str) -> list[float]:
    return [round(each[name], 3) for each in metrics if name in each]


def write_capitals(folder: Path) -> None:
    """Write questions on countries' capitals: a quarter of the countries, held out, is in no training prompt."""
    pairs = [entry.split(" ", 1) for entry in " ".join(CAPITALS.split()).split(", ")]
    random.Random(0).shuffle(pairs)
    for name, chosen in (("eval", pairs[: len(pairs) // 4]), ("train", pairs[len(pairs) // 4 :])):
        rows = (
            {"messages": [{"role": "user", "content": f"What is the capital of {country}?"}], "answer": capital}
            for country, capital in chosen
        )
        (folder / f"capitals_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
