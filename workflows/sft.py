"""Fine-tune on a dataset of examples (SFT, distillation), pairs or scored answers, and publish the result."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.grading.ask_teacher import AskTeacher, TeacherRequest
    from activities.hosts.run_job import JobResult
    from activities.sources.download import Download, DownloadRequest
    from activities.tokenizing.tokenize import MixRequest, MixSources, SourceUnits, Tokenize, Tokenized, TokenizeRequest
    from activities.tokenizing.units import PackDataset, Packed, PackRequest
    from longshore.dataset_runs import (
        DatasetRun,
        DatasetSource,
        DistillRun,
        DPORun,
        RewardRun,
        evaluations_by_split,
        named_sources,
        sources_by_split,
    )
    from longshore.fields import Artifact
    from longshore.losses import Reference
    from longshore.views import RunStatus, SourceShare, shares
    from shared.jobs.job import JobPlan, LeaseGrant, PackedData
    from shared.runs.start import ResolvedModel, RunStart
    from workflows import control
    from workflows.outcomes import with_counts
    from workflows.rollouts.rollouts import HeldOutEvaluations
    from workflows.training import job_plan
    from workflows.training.job_plan import dataset_job
    from workflows.training.run import ActiveRun, RunHandlers, ShownRun, changed, version_shown


# --- Requests of a run on a dataset: pure functions ---


def reference_named(run: DatasetRun) -> str | None:
    """Return the reference or teacher that a run names: `base` or an adapter's URI.

    None: it names none, so that the reference is the model that the run starts from.
    """
    match run:
        case DistillRun(teacher_url=str()):
            return "base"
        case DPORun(reference=named) | DistillRun(teacher=named):
            return named
        case _:
            return None


def teacher_request(start: RunStart, units: Artifact, student: ResolvedModel) -> TeacherRequest | None:
    """Return the request to a teacher behind a URL; None if there is no teacher, or it is on the worker."""
    run = start.run
    if not isinstance(run, DistillRun) or run.teacher_url is None or run.teacher_model is None:
        return None
    return TeacherRequest(
        run_id=start.run_id,
        units=units,
        model=student.model,
        vocab_size=student.shape.vocab_size,
        url=run.teacher_url,
        name=run.teacher_model,
        top_k=run.top_k or 0,
        tenant=start.tenant if run.teacher_key else "",
        key=run.teacher_key,
    )


def tokenize_request(run: DatasetRun, source: DatasetSource, dataset: Artifact, model: Artifact) -> TokenizeRequest:
    """Return the request that tokenizes a run's dataset."""
    return TokenizeRequest(
        dataset=dataset,
        source=source,
        model=model,
        max_tokens=run.max_tokens,
        too_long=run.too_long,
        max_lost_fraction=run.max_lost_fraction,
        pairs=isinstance(run, DPORun | RewardRun) and run.reads_pairs,
        labels=run.reads_labels,
        numbers=run.number_fields if isinstance(run, RewardRun) else (),
        teachers=run.named_teachers if isinstance(run, DistillRun) else (),
    )


def mix_request(run: DatasetRun, read: Sequence[Tokenized]) -> tuple[MixRequest, tuple[SourceShare, ...]] | None:
    """Return the request that puts the sources of a mixture together, and their shares; None without a mixture."""
    if isinstance(run.dataset, DatasetSource):
        return None
    names = named_sources(run.dataset)
    parts = tuple(SourceUnits(name=name, units=found.units) for name, found in zip(names, read, strict=True))
    return MixRequest(parts=parts), shares(run.dataset, [found.num_units for found in read])


def pack_request(
    run: DatasetRun, units: Artifact, sources: tuple[SourceShare, ...] = (), whole: bool = False
) -> PackRequest:
    """Return the request that packs units. `whole`: held-out data, packed as one step of all examples in order."""
    return PackRequest(
        units=units,
        seed=run.seed,
        epochs=None if whole else run.epochs,
        steps=None if whole else run.steps,
        batch_size=None if whole else run.batch_size,
        batch_tokens=None if whole else run.batch_tokens,
        sources=sources,
        bin_tokens=run.bin_tokens or run.max_tokens,
        whole=whole,
    )


class DatasetTraining:
    """The order of a run on a dataset, which local runs share (longshore/local.py).

    Args:
        do: does the run's job on a worker.
        held_out: evaluates checkpoints on held-out prompts, if the run has some.
    """

    def __init__(
        self,
        start: RunStart,
        run: ShownRun,
        do: Callable[[JobPlan], Awaitable[JobResult]],
        held_out: HeldOutEvaluations | None = None,
    ) -> None:
        self._start = start
        self._run = run
        self._do = do
        self._held_out = held_out

    async def train_and_publish(self) -> None:
        start, run = self._start, self._start.run
        self._run.show(phase="checking")
        resolved = await job_plan.resolve_model(start)
        model = resolved.model
        adapter = await job_plan.resolve_initial_adapter(start, resolved)
        reference = await self._resolve_reference(resolved, adapter)

        units, packed = await self._prepare_training(model)
        eval_data = await self._prepare_evaluations(resolved)
        if self._held_out is not None:
            await self._held_out.prepare(self._run, resolved, adapter, packed.num_steps)

        plan = dataset_job(
            start,
            model=model,
            adapter=adapter,
            reference=reference,
            more_teachers=await self._more_teachers(resolved),
            data=PackedData(
                units=units.units, plan=packed.plan, likeliest=await self._teacher_scores(units.units, resolved)
            ),
            eval_data=eval_data,
            num_steps=packed.num_steps,
            probe=self._held_out.probe if self._held_out is not None else (),
        )
        self._run.show(
            num_steps=plan.num_steps,
            planned_tokens=packed.num_tokens,
            dataset_report=units.report_uri,
        )
        self._run.add_notices(units.notices)
        result = await self._done(plan)
        self._run.add_notices(run.decided(result.step, packed.num_steps, result.best.step if result.best else None))

        self._run.show(phase="publishing")
        about = model, result.checkpoint, units.report_uri, result.metrics
        published = await job_plan.publish_weights(job_plan.publish_request(start, *about))
        self._run.show(**version_shown(published))
        self._run.show(state="succeeded", phase="done")

    async def _done(self, plan: JobPlan) -> JobResult:
        """Do the run's job; if it ends for held-out prompts to be evaluated, evaluate them, and continue with the rest.

        The weights before the first step need no worker. A resumed run finds out from its newest checkpoint which
        evaluation is next: its samples are in the store, if it was made before.
        """
        if self._held_out is not None and not self._start.resumed:
            plan = await self._graded(plan, self._held_out)
        while True:
            self._run.show(phase="waiting_for_worker")
            result = await self._do(plan)
            if self._held_out is None or not result.awaits_grades:
                return result
            plan = await self._graded(plan, self._held_out, result)

    async def _graded(self, plan: JobPlan, held_out: HeldOutEvaluations, result: JobResult | None = None) -> JobPlan:
        """Return the job's plan with the grades of the weights that it left; without a result, of the first ones."""
        self._run.show(phase="evaluating")
        graded = await (
            held_out.evaluate(result.step, result.checkpoint, result.probe) if result else held_out.evaluate()
        )
        return plan.model_copy(update={"evaluation": plan.evaluation.model_copy(update={"graded": graded})})

    async def _resolve_reference(self, model: ResolvedModel, initial: Artifact | None) -> Reference:
        """Return the reference of a preference run, by default the model that the run starts from, or a teacher."""
        named = reference_named(self._start.run)
        if named is None:
            return initial or "base"
        return "base" if named == "base" else await job_plan.resolve_reference(self._start, named, model)

    async def _more_teachers(self, model: ResolvedModel) -> list[Reference]:
        """Return the teachers that rows may name."""
        named = [uri for _, uri in self._start.run.teachers] if isinstance(self._start.run, DistillRun) else []
        return ["base" if uri == "base" else await job_plan.resolve_reference(self._start, uri, model) for uri in named]

    async def _teacher_scores(self, units: Artifact, student: ResolvedModel) -> Artifact | None:
        """Return the scores of a teacher behind a URL; None if there is no teacher, or it is on the worker."""
        request = teacher_request(self._start, units, student)
        return None if request is None else await control.do(AskTeacher.ask_teacher, request)

    async def _prepare_training(self, model: Artifact) -> tuple[Tokenized, Packed]:
        """Prepare the run's dataset, or its mixture: each source is read as if alone, and the plan draws from all."""
        run = self._start.run
        read = await self._tokenized(sources_by_split(run.dataset, "train"), model)
        if (mixed := mix_request(run, read)) is None:
            return read[0], await self._packed(pack_request(run, read[0].units))
        units = await control.do(MixSources.mix, mixed[0])
        return units, await self._packed(pack_request(run, units.units, mixed[1]))

    async def _prepare_evaluations(self, model: ResolvedModel) -> dict[str, PackedData]:
        """Prepare the held-out data of each name: one step of all examples in order."""
        run, found = self._start.run, {}
        read = await self._tokenized(evaluations_by_split(run.evaluations), model.model) if run.evaluations else []
        for name, units in zip(run.evaluations, read, strict=True):
            plan = (await self._packed(pack_request(run, units.units, whole=True))).plan
            likeliest = await self._teacher_scores(units.units, model)
            found[name] = PackedData(units=units.units, plan=plan, likeliest=likeliest)
        return found

    async def _tokenized(self, sources: Mapping[str, DatasetSource], model: Artifact) -> list[Tokenized]:
        """Download datasets, each under its own name below the run, and tokenize them."""
        self._run.show(phase="downloading")
        who = {"run_id": self._start.run_id, "tenant": self._start.tenant, "room": self._run.room}
        downloaded = []
        for split, source in sources.items():
            downloaded.append(await control.do(Download.download, DownloadRequest(split=split, source=source, **who)))
            self._run.add_notices(downloaded[-1].notices)
        self._run.show(phase="tokenizing")
        return [
            await control.do(Tokenize.tokenize, tokenize_request(self._start.run, source, found.dataset, model))
            for found, source in zip(downloaded, sources.values(), strict=True)
        ]

    async def _packed(self, request: PackRequest) -> Packed:
        self._run.show(phase="packing")
        return await control.do(PackDataset.pack, request)


@workflow.defn
class SFTWorkflow(RunHandlers):
    """One run: prepare the data, do one job on a leased worker, publish the result.

    Held-out prompts divide the job in parts, between which samplers answer them.
    """

    @workflow.init
    def __init__(self, start: RunStart) -> None:
        self._start = start
        self._held_out = HeldOutEvaluations(start) if start.run.rollouts is not None else None
        self._run = ActiveRun(start, self._current)

    @workflow.run
    async def run(self, start: RunStart) -> RunStatus:
        work = DatasetTraining(start, self._run, self._run.training.do, self._held_out)
        return await self._run.to_its_end(lambda: self._run.interruptible(work.train_and_publish()))

    @workflow.signal
    def sampler_leased(self, grant: LeaseGrant) -> None:
        """Take a host's signal that a sampler is up for this run."""
        if self._held_out is not None:
            self._held_out.sampling.granted(grant)

    def _current(self) -> RunStatus:
        status, training, known, run = self._run.with_jobs(), self._run.training, self._run.status, self._start.run
        metrics = known.metrics | training.metrics  # a resumed run shows its last evaluation until the next one
        is_open = known.state == "running"
        return changed(
            status,
            step=training.step or known.step,
            notices=with_counts(status.notices, skipped_steps=int(metrics.get("skipped", 0))),
            estimated_end=training.eta.end(known.num_steps, training.leasing.epoch, run.eval_every)
            if is_open
            else None,
            metrics=metrics,
            checkpoint=training.checkpoint or known.checkpoint,
            gpu_seconds=status.gpu_seconds + (self._held_out.sampling.held_s if self._held_out is not None else 0.0),
        )
