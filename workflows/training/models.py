"""The model and adapters that a run begins with, and what it publishes."""

from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.models.resolve import AdapterRequest, Resolve
    from activities.publishing.publish import Publish, Published, PublishRequest
    from longshore.fields import Artifact
    from longshore.training import Lora
    from shared.runs.models import ModelRequest, ResolvedModel
    from shared.runs.requests import dtype_of
    from shared.runs.start import AnyStart
    from shared.runs.status import CheckpointRef
    from workflows import control, policies


async def resolve_model(start: AnyStart) -> ResolvedModel:
    """Check the run's model against its engine and layout."""
    run = start.run
    request = ModelRequest(
        run_id=start.run_id,
        tenant=start.tenant,
        uri=run.model,
        layout=run.layout,
        engine=run.engine,
        trainable=run.trainable,
        max_tokens=run.max_tokens,
        dtype=dtype_of(run) if run.quantize_base is None else None,
    )
    return await control.do(Resolve.resolve_model, request)


async def resolve_initial_adapter(start: AnyStart, model: ResolvedModel) -> Artifact | None:
    """Check the adapter that the run begins with, if it names one."""
    run = start.run
    if run.initial_adapter is None:
        return None
    assert isinstance(run.trainable, Lora)  # the request's validation has checked this
    request = adapter_request(start, run.initial_adapter, model, lora=run.trainable)
    return (await control.do(Resolve.resolve_adapter, request)).adapter


def adapter_request(start: AnyStart, uri: str, model: ResolvedModel, **more: Any) -> AdapterRequest:
    """Return the request for an adapter that a run puts on a model: its own, unless `more` names another."""
    who = {"run_id": start.run_id, "tenant": start.tenant, "allow_other_base": start.run.allow_other_base}
    on = {"shape": model.shape, "base": model.model, "model": start.run.model}
    return AdapterRequest(uri=uri, **{**who, **on, **more})


async def resolve_reference(start: AnyStart, uri: str, model: ResolvedModel) -> Artifact:
    """Check the adapter that the run's loss has as its reference."""
    return (await control.do(Resolve.resolve_adapter, adapter_request(start, uri, model, role="reference"))).adapter


async def publish_weights(
    start: AnyStart,
    model: Artifact,
    checkpoint: CheckpointRef | None,
    report_uri: str | None,
    metrics: dict[str, float],
    step: int | None = None,
) -> Published:
    """Publish the checkpoint that a job left. `step`: which one, for a run that publishes several versions."""
    assert checkpoint is not None
    request = PublishRequest(
        run_id=start.run_id,
        tenant=start.tenant,
        run=start.run,
        step=step,
        model=model,
        checkpoint=checkpoint,
        report_uri=report_uri,
        metrics=metrics,
    )
    return await control.do(Publish.publish, request, policies.PATIENT)
