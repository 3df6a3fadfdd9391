"""The program of a job whose plan has its steps: train on packed data, evaluate, save, send, probe."""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np

from longshore.events import Best, Evaluated, Evaluating, EvaluationSample, Kept, Probed
from longshore.fields import Artifact
from longshore.losses import Distillation, has_several_teachers, is_policy_loss, reference_of, scores_old
from megatron_worker.engine import LossFunction
from megatron_worker.losses import check_columns, loss_function
from megatron_worker.process.ranks import CancelledEarly, Fault, Folders, JobFailed, NotFinite
from megatron_worker.trained_slot import Outcome, Passes, Program, TrainedSlot
from megatron_worker.training.batches import Flags, PackedBatches, Role, likeliest_role, logprobs_role
from megatron_worker.training.checkpoint import CheckpointState
from megatron_worker.training.evaluation import Evaluator, held_out_loss, is_due, read_prompts, with_progress
from megatron_worker.warm_engine import WarmState, slots_of
from shared.errors import InvalidInput
from shared.jobs.job import JobPlan, PackedData, Schedule

# --- The learning rate as a function of the step ---


def learning_rate(schedule: Schedule, step: int, num_steps: int) -> float:
    """The rate of step `step` (from 0) of `num_steps`, or of the schedule's own number.

    Warm-up rises by equal parts and reaches the full rate at step `warmup_steps`; no step has rate 0. Decay then falls
    to 0 at `num_steps`, one step after the last.
    """
    if schedule.rates:
        return schedule.rates[step]
    warmup, num_steps = schedule.warmup_steps, schedule.num_steps or num_steps
    if step < warmup:
        return schedule.learning_rate * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, num_steps - warmup)
    match schedule.kind:
        case "constant":
            return schedule.learning_rate
        case "linear":
            return schedule.learning_rate * (1 - done)
        case "cosine":
            return schedule.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class PlannedSteps(Program):
    """See the module's docstring."""

    plan: JobPlan
    folders: Folders
    data: PackedBatches
    evaluators: Sequence[Evaluator]
    slot: TrainedSlot

    @cached_property
    def _loss(self) -> LossFunction:
        return loss_function(self.plan.loss, self.plan.temperature, has_critic=self.plan.critic is not None)

    # Before the first step.

    def before_loading(self, before: CheckpointState | None, kept: WarmState | None) -> Generator[None, None, None]:
        """Load the loss's reference, form micro-batches, and score the data by the reference.

        No checkpoint is loaded yet, as that may replace the base. There are several agreements: loading is collective,
        so no rank may begin it alone.

        Args:
            before: the checkpoint that the job resumes from, or begins with.
        """
        self.slot.ranks.agree(self._check_model)
        self.slot.ranks.agree(lambda: self._load_reference(kept))
        yield None
        self.slot.ranks.agree(lambda: self._form_micro_batches(before))
        yield from _agreed(self.slot, self.slot.dispatcher.score(self._reference_roles()))

    def at_the_beginning(self) -> Generator[None, None, None]:
        """Score the data by the policy of the job's beginning, if its loss needs that.

        The first step is left out: its old policy is the policy itself (targets.py).
        """
        yield from _agreed(self.slot, self.slot.dispatcher.score(self._roles_at_the_beginning()))

    def _roles_at_the_beginning(self) -> Iterator[Role]:
        """Yield the old policy, then the critic, whose rewards may have a penalty by all old log-probabilities."""
        plan, critic = self.plan, self.slot.critic
        if scores_old(plan.loss) and self._scores_policy:
            steps = range(0 if critic is not None else max(self._done(), 1), plan.num_steps)
            yield logprobs_role(self.slot.slot, self.data, steps, plan.temperature, column="old_logprob_N")
        if critic is not None and is_policy_loss(plan.loss):
            yield critic.role(self.data, plan.loss, plan.num_steps)

    @property
    def _scores_policy(self) -> bool:
        """False if nobody asks for the policy's and the reference's scores: a critic is trained alone, on rewards."""
        loss, critic = self.plan.loss, self.plan.critic
        if critic is None or not critic.alone or not is_policy_loss(loss):
            return True
        return loss.kl is not None and loss.kl.placement == "reward"

    @property
    def _reference(self) -> Artifact | None:
        """The adapter that is the loss's reference, if it is one."""
        reference = reference_of(self.plan.loss)
        return reference if isinstance(reference, Artifact) else None

    @property
    def _reference_slot(self) -> str | None:
        """The slot of the loss's reference: that of an adapter; None for the base."""
        return None if self._reference is None else slots_of(self.plan.run_id, self.plan.trainable).reference

    def _check_model(self) -> None:
        """Raise InvalidInput if the model has not the probe's tokens, or not the experts that the data names."""
        facts, routes = self.slot.dispatcher.facts, self.data.units.header.routes
        for place, token_id in enumerate(self.plan.probe):
            if token_id >= facts.vocab_size:
                raise InvalidInput(
                    f"token {token_id} is outside the vocabulary of {facts.vocab_size}", f"probe[{place}]"
                )
        if routes is not None and routes != facts.routes:
            raise InvalidInput(f"routes of {routes}, and the model's experts: {facts.routes}", "data.routes")

    def _load_reference(self, kept: WarmState | None) -> None:
        if self._reference is not None and (kept is None or kept.reference is None):
            assert self._reference_slot is not None
            self.slot.dispatcher.load_frozen(self._reference_slot, self.folders[self._reference])

    def _form_micro_batches(self, before: CheckpointState | None) -> None:
        """Cut the steps to the job's memory budget, if it has one, as the checkpoint before it says.

        A job that begins with another's checkpoint keeps to its micro-batches, too: a run measures once.
        """
        plan = self.plan
        if plan.memory_budget_bytes is not None:
            tokens = None if before is None else before.micro_batch_tokens
            recorded = None if before is None or tokens is None else (tokens, before.recompute)
            limits = plan.memory_budget_bytes, plan.max_micro_batch_tokens
            dispatcher, slot = self.slot.dispatcher, self.slot.slot
            dispatcher.form_micro_batches(slot, self.data, self._loss, *limits, plan.recompute, recorded)
            self.slot.micro_batch_tokens = self.data.most_tokens

    def _reference_roles(self) -> Iterator[Role]:
        """Yield the loss's reference, or its teachers, for the data of the steps and for that held out."""
        plan, slot = self.plan, self._reference_slot
        if not self._scores_policy:
            return
        match plan.loss:
            case Distillation() if plan.data.likeliest is not None:
                return
            case Distillation(tokens="all"):  # computed in the steps
                self.slot.dispatcher.teachers[self.slot.slot] = slot
                return
            case Distillation(top_k=top_k):
                if (top_k or 0) > (most := self.slot.dispatcher.facts.vocab_size):
                    raise InvalidInput(f"top_k may be {most} at most, the size of the vocabulary", "loss.top_k")
                role = partial(likeliest_role, top_k=top_k or 0)
            case loss if reference_of(loss) is not None:
                role = partial(logprobs_role, column="ref_logprob_N")
            case _:
                return
        last = plan.evaluation.next_graded(self._done(), plan.num_steps)
        steps = range(0 if plan.critic is not None else self._done(), last)
        for of, number in self._teachers(slot):
            yield role(of, self.data, steps, plan.temperature, at_N=_targets_of(self.data, number))
            for held_out in (each.data for each in self.evaluators if each.wants_reference):
                # It is evaluated at temperature 1.
                yield role(of, held_out, range(1), 1.0, at_N=_targets_of(held_out, number))

    def _teachers(self, slot: str | None) -> Iterator[tuple[str | None, int | None]]:
        """Yield the slot of the reference; or of each of several teachers, while it is loaded, with its number.

        They come one after another into one slot: `teacher` last, which stays there.
        """
        loss = self.plan.loss
        if not has_several_teachers(loss):
            yield slot, None
            return
        loaded = slots_of(self.plan.run_id, self.plan.trainable).reference
        for number, teacher in reversed([*enumerate((loss.teacher, *loss.more_teachers))]):
            if isinstance(teacher, Artifact):
                self.slot.dispatcher.drop_slot(loaded)
                self.slot.dispatcher.load_frozen(loaded, self.folders[teacher])
            yield loaded if isinstance(teacher, Artifact) else None, number

    # The steps.

    def run(self, by_hand: bool) -> Passes:
        """Do the steps that are left, with evaluations and checkpoints between them."""
        with self.slot.dispatcher.resident(self.slot.slot):
            evaluated = yield from self._evaluate()
            while not self._is_done() and not self._awaits_grades() and not self.slot.cancelled():
                yield None
                yield from self._step()
                every = self.plan.checkpointing.every_steps
                if self._is_done() or (every > 0 and self._done() % every == 0):
                    self.slot.save()
                evaluated = yield from self._evaluate()
            with self.slot.sent() if self._is_done() else nullcontext():
                self.slot.save()
        awaits = self._awaits_grades()
        if not (evaluated and (awaits or self._is_done())):
            return Outcome("cancelled", self.slot.at)
        if self.plan.probe:
            logprobs = self.slot.dispatcher.probe(self.slot.slot, self.plan.probe)
            self.slot.report.emit(Probed, step=self.slot.at, logprobs=logprobs)
        best = None if awaits else self._best()
        return Outcome("succeeded", self.slot.at, kept=self._kept(), best=best, awaits_grades=awaits)

    def _done(self) -> int:
        """Return the steps of the plan that are done."""
        return self.slot.at - self.plan.first_step

    def _awaits_grades(self) -> bool:
        return self.plan.evaluation.awaits_grades(self._done(), self.plan.num_steps)

    def _is_done(self) -> bool:
        return self.slot.at == self.plan.last_step or self.plan.evaluation.is_over(self.slot.evaluations)

    def _step(self) -> Generator[None, None, None]:
        """Do one update. A step without any trained token is skipped.

        Raises:
            JobFailed: `not_finite`; no weight has changed since the step before.
        """
        number = self.slot.at + 1
        rate = learning_rate(self.plan.schedule, self.slot.at, self.plan.last_step)
        try:
            critics = yield from self._critic_step()
            beside = critics | self._sources_of_step()
            if self.plan.critic is not None and self.plan.critic.alone:
                self.slot.skip_step(number, critics)
                return
            sums = yield from self.slot.forward_backward(self.data, self._done(), self._loss)
            if sums["weight"]:
                self.slot.optim_step(number, self.plan.optimizer, rate, sums["weight"], beside)
            else:
                self.slot.skip_step(number, beside)
        except NotFinite as error:
            message = f"step {number}: {error.what}; try a lower learning rate, or look for broken rows"
            raise JobFailed(Fault(kind="not_finite", message=message)) from None

    def _sources_of_step(self) -> dict[str, float]:
        """Return how many examples and tokens of the next step are from each source, if the data is a mixture."""
        if not (sources := self.data.units.header.sources):
            return {}
        units = np.concatenate(self.data.bins(self._done()))
        source_U = self.data.sources_of(units)
        examples = np.bincount(source_U, minlength=len(sources)).tolist()
        tokens = np.bincount(source_U, self.data.units.num_tokens(units), minlength=len(sources)).tolist()
        found: dict[str, float] = {}
        for source, *counts in zip(sources, examples, tokens, strict=True):
            found |= {f"examples_{source.name}": float(counts[0]), f"tokens_{source.name}": float(counts[1])}
        return found

    def _critic_step(self) -> Generator[None, None, dict[str, float]]:
        """Update the critic, if there is one. Returns its metrics. Raises NotFinite."""
        if self.slot.critic is None:
            return {}
        if self.slot.critic.plan.part == "policy":
            return dict(self.slot.critic.facts)
        schedule = self.plan.schedule.model_copy(update={"learning_rate": self.slot.critic.plan.learning_rate})
        rate = learning_rate(schedule, self.slot.at, self.plan.last_step)
        return (yield from self.slot.critic.step(self._done(), self.plan.optimizer, rate))

    def _evaluate(self) -> Generator[None, None, bool]:
        """Report held-out metrics and samples, if they are due now. Returns False if a cancellation interrupted it.

        Weights that are the best so far are saved, if the job keeps the best. A job that resumes evaluates its first
        weights again, with the same result.

        Raises InvalidInput: the evaluation lacks a metric that is watched.
        """
        dispatcher, emit = self.slot.dispatcher, self.slot.report.emit
        evaluation, graded = self.plan.evaluation, self.plan.evaluation.graded
        if graded is not None and graded.step != self._done():
            graded = None
        of_rows = is_due(evaluation, self._done(), self.plan.num_steps)
        if self._awaits_grades() or not (of_rows or graded):
            return True
        metrics = {name.removeprefix("eval_"): v for name, v in graded.metrics.items()} if graded else {}
        samples: tuple[EvaluationSample, ...] = ()

        def tell(place: int, part: Literal["rows", "samples"], done: float) -> None:
            whole = (place + done) / len(self.evaluators)
            emit(Evaluating, step=self.slot.at, fraction=whole, part=part)

        evaluators = self.evaluators if of_rows else ()
        for place, evaluator in enumerate(evaluators):
            passes = dispatcher.evaluate(self.slot.slot, evaluator.data, evaluator.loss_function, self.slot.cancelled)
            num_passes = dispatcher.num_scoring_passes(evaluator.data)
            sums = yield from with_progress(passes, num_passes, partial(tell, place, "rows"))
            if sums is None:
                return False
            metrics |= evaluator.metrics(sums)
        for place, evaluator in enumerate(evaluators):
            sampling = evaluator.samples(partial(dispatcher.greedy, self.slot.slot), self.slot.cancelled)
            num_passes = evaluator.num_sampling_passes
            shown = yield from with_progress(sampling, num_passes, partial(tell, place, "samples"))
            if shown is None:
                return False
            samples += shown
        drawn = graded.samples if graded else {}
        emit(Evaluated, step=self.slot.at, metrics=metrics, samples=samples, drawn=drawn)
        self._watch({f"eval_{name}": value for name, value in metrics.items()})
        return True

    def _watch(self, metrics: Mapping[str, float]) -> None:
        evaluation = self.plan.evaluation
        for name in sorted(evaluation.watched - metrics.keys()):
            if self._done() and evaluation.graded_every is not None:
                return  # of rows and of prompts, which are evaluated after other steps, only one kind decides
            known = ", ".join(sorted(metrics))
            raise InvalidInput(f"the evaluations have no {name}; they have {known}", "best_by or early_stop.metric")
        if evaluation.watched and self._done():  # before the first step there is nothing to publish
            self.slot.evaluations = evaluation.with_evaluation(self.slot.evaluations, self.slot.at, metrics)
            if evaluation.best(self.slot.evaluations) == self.slot.at:
                self.slot.report.emit(Kept, step=self.slot.at)
                self.slot.save()

    def _best(self) -> Best | None:
        evaluation, evaluations = self.plan.evaluation, self.slot.evaluations
        if (step := evaluation.best(evaluations)) is None or (metric := evaluation.keeps_by) is None:
            return None
        return Best(step=step, metric=metric, value=evaluations[step][metric])

    def _kept(self) -> WarmState | None:
        """Return the state that stays in the engine, if another job is expected to continue from it."""
        if self.plan.after != "keep" and not is_policy_loss(self.plan.loss):
            return None
        assert self.slot.written is not None
        critic = None if self.slot.critic is None else (self.slot.critic.plan.trainable, self.slot.critic.scale)
        return WarmState(self.plan.trainable, self.slot.written, self._reference, critic)


def open_data(plan: JobPlan, folders: Folders, open_files: ExitStack) -> tuple[PackedBatches, list[Evaluator]]:
    """Open training and held-out data, until `open_files` is closed.

    Raises:
        InvalidInput: it has too few steps, lacks a column that the loss needs, or is damaged.
    """

    def open_packed(data: PackedData) -> PackedBatches:
        likeliest = None if data.likeliest is None else folders[data.likeliest]
        return open_files.enter_context(PackedBatches.open(folders[data.units], folders[data.plan], likeliest))

    training, loss = open_packed(plan.data), held_out_loss(plan.loss)
    check_columns(training.units, plan.loss)
    if plan.num_steps > training.num_steps:
        raise InvalidInput(f"the job has {plan.num_steps} steps, its data {training.num_steps}", "num_steps")
    evaluators = []
    for name, held_out in plan.evaluation.held_out.items():
        evaluated, prompts = open_packed(held_out), read_prompts(folders[held_out.units])
        check_columns(evaluated.units, loss)
        evaluators.append(Evaluator(plan.evaluation, name, evaluated, prompts, folders[plan.model], loss))
    return training, evaluators


def _targets_of(data: PackedBatches, teacher: int | None) -> Flags | None:
    """Return the targets that learn from a teacher, of several: bool [N]; None: all."""
    return None if teacher is None else np.asarray(data.units.columns["advantage"] == teacher)


def _agreed(slot: TrainedSlot, passes: Iterator[None]) -> Generator[None, None, None]:
    """Do a command's passes, each agreed on by all ranks. Raises CancelledEarly between them."""
    end = object()
    while slot.ranks.agree(lambda: next(passes, end)) is not end:
        if slot.cancelled():
            raise CancelledEarly
        yield None
