"""Fine-tune on a dataset of examples (SFT, distillation), pairs or scored answers, and publish the result."""

from typing import Literal

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.grading.ask_teacher import AskTeacher, TeacherRequest
    from activities.packing import PackDataset, Packed, PackRequest
    from activities.sources.download import Download, DownloadRequest
    from activities.tokenizing.tokenize import Tokenize, Tokenized, TokenizeRequest
    from longshore.fields import Artifact
    from longshore.losses import Reference
    from shared.jobs.job import PackedData
    from shared.runs.dataset_runs import DatasetSource, DistillRun, DPORun, RewardRun
    from shared.runs.start import ResolvedModel, RunStart
    from shared.runs.status import RunStatus
    from workflows import control
    from workflows.outcomes import with_counts
    from workflows.training import job_plan
    from workflows.training.job_plan import dataset_job
    from workflows.training.run import ActiveRun, RunHandlers, changed


@workflow.defn
class SFTWorkflow(RunHandlers):
    """One run: prepare the data, do one job on a leased worker, publish the result."""

    @workflow.init
    def __init__(self, start: RunStart) -> None:
        self._start = start
        self._run = ActiveRun(start, self._current)

    @workflow.run
    async def run(self, start: RunStart) -> RunStatus:
        return await self._run.to_its_end(lambda: self._run.interruptible(self._train_and_publish()))

    async def _train_and_publish(self) -> None:
        start, run = self._start, self._start.run
        self._run.show(phase="checking")
        resolved = await job_plan.resolve_model(start)
        model = resolved.model
        adapter = await job_plan.resolve_initial_adapter(start, resolved)
        reference = await self._resolve_reference(resolved, adapter)

        units, packed = await self._prepare("train", run.dataset, model)
        eval_data = None
        if run.eval_dataset is not None:
            eval_units, eval_packed = await self._prepare("eval", run.eval_dataset, model)
            eval_data = PackedData(
                units=eval_units.units, plan=eval_packed.plan, likeliest=await self._taught(eval_units.units, resolved)
            )

        plan = dataset_job(
            start,
            model=model,
            adapter=adapter,
            reference=reference,
            more_teachers=await self._more_teachers(resolved),
            data=PackedData(units=units.units, plan=packed.plan, likeliest=await self._taught(units.units, resolved)),
            eval_data=eval_data,
            num_steps=packed.num_steps,
        )
        self._run.show(
            phase="waiting_for_worker",
            num_steps=plan.num_steps,
            planned_tokens=packed.num_tokens,
            dataset_report=units.report_uri,
        )
        self._run.add_notices(units.notices)
        result = await self._run.training.do(plan)

        self._run.show(phase="publishing")
        published = await job_plan.publish_weights(start, model, result.checkpoint, units.report_uri, result.metrics)
        self._run.show(
            state="succeeded",
            phase="done",
            adapter=published.uri,
            adapter_sha256=published.sha256,
            name=published.name,
            version=published.version,
        )

    async def _resolve_reference(self, model: ResolvedModel, initial: Artifact | None) -> Reference:
        """Return the reference of a preference run, by default the model that the run starts from, or a teacher."""
        match self._start.run:
            case DistillRun(teacher_url=str()):
                return "base"
            case DPORun(reference=str(named)) | DistillRun(teacher=named):
                return "base" if named == "base" else await job_plan.resolve_reference(self._start, named, model)
            case _:
                return initial or "base"

    async def _more_teachers(self, model: ResolvedModel) -> list[Reference]:
        """Return the teachers that rows may name."""
        named = [uri for _, uri in self._start.run.teachers] if isinstance(self._start.run, DistillRun) else []
        return ["base" if uri == "base" else await job_plan.resolve_reference(self._start, uri, model) for uri in named]

    async def _taught(self, units: Artifact, student: ResolvedModel) -> Artifact | None:
        """Return the scores of a teacher behind a URL; None if there is no teacher, or it is on the worker."""
        run = self._start.run
        if not isinstance(run, DistillRun) or run.teacher_url is None or run.teacher_model is None:
            return None
        request = TeacherRequest(
            run_id=self._start.run_id,
            units=units,
            model=student.model,
            vocab_size=student.shape.vocab_size,
            url=run.teacher_url,
            name=run.teacher_model,
            top_k=run.top_k or 0,
            tenant=self._start.tenant if run.teacher_key else "",
            key=run.teacher_key,
        )
        return await control.do(AskTeacher.ask_teacher, request)

    async def _prepare(
        self, split: Literal["train", "eval"], source: DatasetSource, model: Artifact
    ) -> tuple[Tokenized, Packed]:
        """Download, tokenize and pack a dataset. Held-out data is packed as one step of all examples in order."""
        run = self._start.run
        self._run.show(phase="downloading")
        request = DownloadRequest(run_id=self._start.run_id, tenant=self._start.tenant, split=split, source=source)
        downloaded = await control.do(Download.download, request)
        self._run.add_notices(downloaded.notices)
        self._run.show(phase="tokenizing")
        tokenized = await control.do(
            Tokenize.tokenize,
            TokenizeRequest(
                dataset=downloaded.dataset,
                source=source,
                model=model,
                max_tokens=run.max_tokens,
                too_long=run.too_long,
                max_lost_fraction=run.max_lost_fraction,
                pairs=isinstance(run, DPORun | RewardRun) and run.reads_pairs,
                labels=run.reads_labels,
                numbers=run.number_fields if isinstance(run, RewardRun) else (),
                teachers=run.named_teachers if isinstance(run, DistillRun) else (),
            ),
        )
        self._run.show(phase="packing")
        whole = split == "eval"
        packed = await control.do(
            PackDataset.pack,
            PackRequest(
                units=tokenized.units,
                seed=run.seed,
                epochs=None if whole else run.epochs,
                steps=None if whole else run.steps,
                batch_size=None if whole else run.batch_size,
                batch_tokens=None if whole else run.batch_tokens,
                bin_tokens=run.bin_tokens or run.max_tokens,
                whole=whole,
            ),
        )
        return tokenized, packed

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
        )
