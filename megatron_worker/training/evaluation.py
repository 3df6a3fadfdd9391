"""Computes the held-out loss, over all bins of an evaluation's plan, and greedy completions of its first prompts.

The loss is the job's, except for policy losses: held-out rows have no advantages, so theirs is cross entropy.
"""

import json
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from longshore.events import EvaluationSample
from longshore.fields import Frozen
from longshore.losses import CrossEntropy, Loss, is_policy_loss, reference_of
from megatron_worker.engine import PART, SUM, LossFunction, reported
from megatron_worker.losses import loss_function
from megatron_worker.training.batches import PackedBatches
from shared.errors import CorruptArtifact
from shared.field_rules import first_rule
from shared.jobs.job import Evaluation
from shared.models.end_tokens import read_end_ids

T = TypeVar("T")
Greedy = Callable[[list[list[int]], int, frozenset[int]], list[list[int]]]
"""Continues prompts greedily, by a number of tokens or up to one of the stop ids."""
_TELL_EVERY_S = 5.0
_TOKENS_A_TURN = 8


class HeldOutPrompt(Frozen):
    """A held-out row: the prompt that the model is shown, the answer in the data, and the tokens that end it there."""

    prompt_ids: list[int]
    prompt: str
    reference: str | None = None
    end_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a job on held-out data. `name`: its name in metrics; empty if it is the only one."""

    evaluation: Evaluation
    name: str
    data: PackedBatches
    prompts: list[HeldOutPrompt]
    model: Path
    loss: Loss

    @property
    def wants_reference(self) -> bool:
        """True if the loss needs the reference's log-probabilities."""
        return reference_of(self.loss) is not None

    @property
    def num_sampling_passes(self) -> int:
        """Return how many passes `samples` makes at most."""
        return math.ceil(self.evaluation.sample_tokens / _TOKENS_A_TURN)

    @property
    def loss_function(self) -> LossFunction:
        return loss_function(self.loss)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the held-out loss, its metrics (perplexity for cross entropy) and counts, from sums over the rows."""
        held_out = _held_out(sums)
        if isinstance(self.loss, CrossEntropy) and "loss" in held_out:
            held_out["perplexity"] = math.exp(min(held_out["loss"], 700.0))
        return {f"{self.name}_{metric}": value for metric, value in held_out.items()} if self.name else held_out

    def samples(
        self, greedy: Greedy, cancelled: Callable[[], bool]
    ) -> Generator[None, None, tuple[EvaluationSample, ...] | None]:
        """Greedy completions of the first `num_samples` prompts; None when cancelled. Yields between its passes."""
        prompts = self.prompts[: self.evaluation.num_samples]
        if not prompts:
            return ()
        completions = yield from self._complete(greedy, [p.prompt_ids for p in prompts], cancelled)
        if completions is None:
            return None
        from tokenizers import Tokenizer

        path = self.model / "tokenizer.json"
        if not path.exists():
            raise CorruptArtifact("the model has no tokenizer.json to decode samples with", str(self.model))
        texts = Tokenizer.from_file(str(path)).decode_batch(completions, skip_special_tokens=True)
        return tuple(
            EvaluationSample(prompt=p.prompt, completion=text, reference=p.reference, evaluation=self.name)
            for p, text in zip(prompts, texts, strict=True)
        )

    def _complete(
        self, greedy: Greedy, prompts: list[list[int]], cancelled: Callable[[], bool]
    ) -> Generator[None, None, list[list[int]] | None]:
        """Complete prompts a few tokens a pass, so that a cancel is noticed soon; None when cancelled."""
        # The tokens that end an answer: what the model's files name, and what training puts there.
        stop_ids = frozenset(read_end_ids(self.model)).union(*(prompt.end_ids for prompt in self.prompts))
        max_tokens = self.evaluation.sample_tokens
        completions: list[list[int]] = [[] for _ in prompts]
        growing = list(range(len(prompts)))
        for done in range(0, max_tokens, _TOKENS_A_TURN):
            if cancelled():
                return None
            length = min(_TOKENS_A_TURN, max_tokens - done)
            more = greedy([prompts[row] + completions[row] for row in growing], length, stop_ids)
            for row, tokens in zip(growing, more, strict=True):
                completions[row] += tokens
            growing = [row for row, tokens in zip(growing, more, strict=True) if len(tokens) == length]
            yield
        return completions


def is_due(evaluation: Evaluation, step: int, num_steps: int) -> bool:
    """Return True before the first step, after the last, and every `every_steps` between, if there is data."""
    every = evaluation.every_steps
    return bool(evaluation.held_out) and (step in (0, num_steps) or (every > 0 and step % every == 0))


def _held_out(sums: dict[str, float]) -> dict[str, float]:
    counts = {"tokens": sums["tokens"], "target_tokens": sums["target_tokens"]}
    if not sums["weight"]:
        return counts
    mean_names = {name.removesuffix(SUM).partition(PART)[0] for name in sums if name.endswith(SUM)}
    means = {name: value for name, value in reported(sums).items() if name in mean_names}
    return {"loss": sums["loss"] / sums["weight"], **means, **counts}


def held_out_loss(loss: Loss) -> Loss:
    """Return the loss that evaluates a job trained with `loss`."""
    return CrossEntropy() if is_policy_loss(loss) else loss


_prompts: TypeAdapter[list[HeldOutPrompt]] = TypeAdapter(list[HeldOutPrompt])


def read_prompts(units: Path) -> list[HeldOutPrompt]:
    """Read `prompts.json`, next to the units. Data that was tokenized elsewhere has none."""
    path = units / "prompts.json"
    try:
        return _prompts.validate_python(json.loads(path.read_bytes())) if path.exists() else []
    except json.JSONDecodeError as error:
        raise CorruptArtifact(f"no JSON: {error}", str(path)) from error
    except ValidationError as error:
        raise CorruptArtifact(first_rule(error), str(path)) from error


def with_progress(
    passes: Generator[None, None, T],
    num_passes: int,
    tell: Callable[[float], None],
    now: Callable[[], float] = time.monotonic,
) -> Generator[None, None, T]:
    """Do passes, and tell every few seconds how much of them is done. `now`: a clock."""
    done, told_at = 0, now()
    while True:
        try:
            next(passes)
        except StopIteration as end:
            result: T = end.value
            return result
        done += 1
        if now() - told_at >= _TELL_EVERY_S:
            told_at = now()
            tell(min(1.0, done / num_passes))
        yield None
