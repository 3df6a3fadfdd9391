"""Fine-tuning on a dataset, of examples (SFT) or of preference pairs (DPO): from there to a published adapter."""

import asyncio
from typing import Literal

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.hosts.progress import ProgressReport
    from activities.models.publish import Published, PublishRequest
    from activities.models.resolve_adapter import AdapterRequest, ResolvedAdapter
    from activities.packing.pack import Packed, PackRequest
    from activities.sources.download import Downloaded, DownloadRequest
    from activities.tokenizing.tokenize import Tokenized, TokenizeRequest
    from shared.contract import Artifact
    from shared.jobs.job import PackedData, Reference
    from shared.jobs.layout import ModelShape
    from shared.jobs.leases import LeaseGrant
    from shared.runs.requests import DatasetSource, DPORun
    from shared.runs.start import ModelRequest, ResolvedModel, RunStart
    from shared.runs.status import RunStatus
    from workflows import control, policies
    from workflows.outcomes import close, ended_early, with_skipped
    from workflows.training.glance import Glance
    from workflows.training.interruption import Work
    from workflows.training.job_plan import dataset_job
    from workflows.training.training import Training


@workflow.defn
class SFTWorkflow:
    """One run. Its state is one `RunStatus`, which the query `status` shows and `result.json` keeps."""

    @workflow.init
    def __init__(self, start: RunStart) -> None:
        self._start = start
        self._status = RunStatus(
            run_id=start.run_id,
            kind=start.run.kind,
            name=start.run.name or start.run_id,
            started_at=workflow.info().start_time.timestamp(),
        )
        self._work = Work()
        self._glance = Glance(None)
        self._training = Training(start, self._work, self._look)

    @workflow.run
    async def run(self, start: RunStart) -> RunStatus:
        try:
            await self._work.whole(self._glance.begin(start, self._show))
            await self._work.do(self._train_and_publish())
        except (Exception, asyncio.CancelledError) as error:
            if not self._glance.has_begun:
                raise
            self._status = ended_early(self._status, error, self._work.is_pausing)
        self._show(ended_at=workflow.now().timestamp())
        await control.record("record_result", self.status())
        return close(self.status())

    async def _train_and_publish(self) -> None:
        start, run = self._start, self._start.run
        self._show(phase="checking")
        asked = ModelRequest(
            run_id=start.run_id, tenant=start.tenant, uri=run.model, layout=run.layout, engine=run.engine
        )
        resolved = await control.do("resolve_model", asked, ResolvedModel)
        model = resolved.model
        adapter = await self._resolve_adapter(resolved.shape)
        reference = await self._resolve_reference(resolved.shape, adapter)

        units, packed = await self._prepare("train", run.dataset, model)
        eval_data = None
        if run.eval_dataset is not None:
            eval_units, eval_packed = await self._prepare("eval", run.eval_dataset, model)
            eval_data = PackedData(units=eval_units.units, plan=eval_packed.plan)

        plan = dataset_job(
            start,
            model=model,
            adapter=adapter,
            reference=reference,
            data=PackedData(units=units.units, plan=packed.plan),
            eval_data=eval_data,
            num_steps=packed.num_steps,
        )
        self._show(phase="waiting_for_worker", num_steps=plan.num_steps, dataset_report=units.report_uri)
        result = await self._training.do(plan)

        self._show(phase="publishing")
        assert result.checkpoint is not None
        published = await control.do(
            "publish",
            PublishRequest(
                run_id=start.run_id,
                tenant=start.tenant,
                run=run,
                model=model,
                checkpoint=result.checkpoint,
                report_uri=units.report_uri,
                metrics=result.metrics,
            ),
            Published,
            policies.PATIENT,
        )
        self._show(
            state="succeeded",
            phase="done",
            adapter=published.uri,
            adapter_sha256=published.sha256,
            name=published.name,
            version=published.version,
        )

    async def _resolve_adapter(self, shape: ModelShape) -> Artifact | None:
        start, run = self._start, self._start.run
        if run.initial_adapter is None:
            return None
        assert run.trainable.kind == "lora"  # runs take an adapter with nothing else
        request = AdapterRequest(
            run_id=start.run_id, tenant=start.tenant, uri=run.initial_adapter, lora=run.trainable, shape=shape
        )
        return (await control.do("resolve_adapter", request, ResolvedAdapter)).adapter

    async def _resolve_reference(self, shape: ModelShape, initial: Artifact | None) -> Reference:
        """What a preference run stays near: by default the model as the run begins with it."""
        run = self._start.run
        if not isinstance(run, DPORun) or run.reference is None:
            return initial or "base"
        if run.reference == "base":
            return "base"
        request = AdapterRequest(
            run_id=self._start.run_id, tenant=self._start.tenant, role="reference", uri=run.reference, shape=shape
        )
        return (await control.do("resolve_adapter", request, ResolvedAdapter)).adapter

    async def _prepare(
        self, split: Literal["train", "eval"], source: DatasetSource, model: Artifact
    ) -> tuple[Tokenized, Packed]:
        """Download, tokenize, pack. Evaluation takes all its examples once, in their order, as one step."""
        run = self._start.run
        self._show(phase="downloading")
        request = DownloadRequest(run_id=self._start.run_id, tenant=self._start.tenant, split=split, source=source)
        downloaded = await control.do("download", request, Downloaded)
        self._show(phase="tokenizing")
        tokenized = await control.do(
            "tokenize",
            TokenizeRequest(
                dataset=downloaded.dataset,
                source=source,
                model=model,
                max_tokens=run.max_tokens,
                too_long=run.too_long,
                max_lost_fraction=run.max_lost_fraction,
                pairs=isinstance(run, DPORun),
            ),
            Tokenized,
        )
        self._show(phase="packing")
        whole = split == "eval"
        packed = await control.do(
            "pack",
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
            Packed,
        )
        return tokenized, packed

    def _show(self, **changes: object) -> None:
        self._status = self._status.model_copy(update=changes)
        self._look()

    def _look(self) -> None:
        self._glance.note(self.status())

    @workflow.query
    def status(self) -> RunStatus:
        """The run as it stands."""
        training = self._training
        metrics = self._status.metrics | training.metrics  # an earlier execution's evaluation counts until the next
        phase = "training" if self._status.phase == "waiting_for_worker" and training.is_leased else self._status.phase
        return self._status.model_copy(
            update={
                "phase": phase,
                "epoch": training.epoch,
                "step": training.step or self._status.step,
                "notices": with_skipped((*self._status.notices, *training.notices), int(metrics.get("skipped", 0))),
                "workers_lost": self._glance.workers_lost_before + training.num_lost,
                "estimated_end": self._estimated_end,
                "metrics": metrics,
                "checkpoint": training.checkpoint or self._status.checkpoint,
                "timeline": self._glance.timeline,
                "gpu_seconds": self._glance.gpu_seconds_before + training.held_s * self._start.run.layout.world_size,
            }
        )

    @property
    def _estimated_end(self) -> float | None:
        is_open = self._status.state == "running"
        return self._training.pace.end(self._status.num_steps, self._training.epoch) if is_open else None

    @workflow.signal
    def leased(self, grant: LeaseGrant) -> None:
        """A host has a worker up for this run."""
        self._training.leased(grant)

    @workflow.signal
    def pause(self) -> None:
        """End at the next step boundary, with a checkpoint, until somebody resumes the run."""
        self._work.pause()

    @workflow.signal
    def progress(self, report: ProgressReport) -> None:
        """The job got ahead, or a checkpoint stands."""
        self._training.progress(report)
