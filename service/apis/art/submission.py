"""Giving a model its next job. Its runs follow one another: each goes on from the newest version of the model.

Train steps with the same settings are one run's, which keeps its optimizer's state. Other settings, or a supervised job
in between, end that run, and what comes next begins another.
"""

import asyncio
import secrets
import time
from contextlib import suppress

from service.accounts.principals import Principal
from service.apis.art.job_request import ExperimentalConfig, SftConfig
from service.apis.art.job_runs import MODEL_LABEL, rl_run, sft_run, source_of
from service.backend import Backend
from service.errors import Conflict
from service.inference.art_models import ArtModel
from service.runs.views import RunView
from shared.runs.status import StepRequest, StepStatus

_ENDING_PATIENCE_S = 15.0
_LOOK_EVERY_S = 0.2


async def submit_step(
    backend: Backend, asking: Principal, model: ArtModel, config: ExperimentalConfig, groups: str
) -> tuple[str, StepStatus]:
    """Hand a file of groups to the model's run, which is started where there is none. Returns its id, and the step.

    Raises:
        InvalidInput: names the field and the rule that it breaks.
        Conflict: the model is busy with a job of another kind, or of other settings.
        QuotaExceeded
    """
    wanted = rl_run(model, config, None)
    async with backend.art_models.lock(model.model_id):
        run_id = None
        if (last := await _open_run(backend, asking.tenant, model)) is not None:
            if last.run == wanted.model_copy(update={"initial_adapter": last.run.initial_adapter}):
                run_id = last.run_id
            else:
                await _end(backend, last)
        if run_id is None:
            run = wanted.model_copy(update={"initial_adapter": await backend.art_models.newest(model)})
            source = source_of(model, config.model_dump(mode="json", exclude_none=True))
            run_id = (await backend.runs.submit(asking, run, source=source)).run_id
        request = StepRequest(key=f"art-{secrets.token_hex(12)}", groups=groups)
        return run_id, await backend.steps.train(asking.tenant, run_id, request)


async def submit_sft(backend: Backend, asking: Principal, model: ArtModel, url: str, config: SftConfig) -> RunView:
    """Start a supervised job. Raises as `submit_step` does."""
    run = sft_run(model, url, config, None)
    await backend.runs.check_run(asking.tenant, run, "longshore.")
    async with backend.art_models.lock(model.model_id):
        if (last := await _open_run(backend, asking.tenant, model)) is not None:
            await _end(backend, last)
        run = run.model_copy(update={"initial_adapter": await backend.art_models.newest(model)})
        source = source_of(model, {"training_data_url": url, **config.model_dump(mode="json", exclude_none=True)})
        return await backend.runs.submit(asking, run, source=source)


async def stop(backend: Backend, tenant: str, model: ArtModel) -> None:
    """Cancel what a model is busy with."""
    if (last := await _open_run(backend, tenant, model)) is not None:
        with suppress(Conflict):  # it has just ended
            await backend.runs.cancel(tenant, last.run_id)


async def _open_run(backend: Backend, tenant: str, model: ArtModel) -> RunView | None:
    """The model's newest run, if it is going on."""
    page = await backend.runs.page(tenant, limit=1, api="art", metadata={MODEL_LABEL: model.model_id})
    if not page.runs:
        return None
    view = await backend.runs.view(tenant, page.runs[0].run_id)
    return view if view.state == "running" else None


async def _end(backend: Backend, view: RunView) -> None:
    """Let a run that takes steps end well, after those that it has. Raises Conflict when that takes long."""
    if view.kind == "rl":
        with suppress(Conflict):  # it has just ended
            await backend.steps.finish(view.tenant, view.run_id)
        deadline = time.monotonic() + _ENDING_PATIENCE_S
        while time.monotonic() < deadline:
            if (await backend.runs.view(view.tenant, view.run_id)).state != "running":
                return
            await asyncio.sleep(_LOOK_EVERY_S)
    raise Conflict(f"the model is busy with {view.run_id}, a job of another kind or other settings: wait for its end")
