"""Notices for webhooks: one for each change of a run's state."""

import time
from typing import get_args

from shared.runs.requests import RunRecord
from shared.runs.status import RunStatus, State
from shared.runs.webhooks import NOTICE_TYPES, Notice, NoticeType, new_notice_id

# Notices of a run that was sent through OpenAI's API have its names, where it has one.
_OPENAI: dict[State, NoticeType] = {
    "succeeded": "fine_tuning.job.succeeded",
    "failed": "fine_tuning.job.failed",
    "cancelled": "fine_tuning.job.cancelled",
}
_ENDED: dict[State, NoticeType] = {
    "paused": "run.paused",
    "succeeded": "run.succeeded",
    "failed": "run.failed",
    "cancelled": "run.cancelled",
}
assert set(_ENDED) == set(get_args(State)) - {"running"} and set(_ENDED.values()) <= set(NOTICE_TYPES)


def notice_of(record: RunRecord, status: RunStatus, before: State | None) -> Notice | None:
    """The notice of a change of state; None where nothing changed.

    Args:
        before: the state that the run had; None for a run that was not known.
    """
    if status.state == before:
        return None
    return Notice(
        notice_id=new_notice_id(),
        tenant=record.tenant,
        type=_type(record, status.state, before),
        created_at=time.time(),
        data={
            "id": record.run_id,
            "object": "fine_tuning.job" if record.source.api == "openai" else "run",
            "kind": record.run.kind,
            "name": record.run.name or record.run_id,
            "state": status.state,
            "step": status.step,
            "adapter": status.adapter,
            "problem": status.problem.message if status.problem else None,
            "schedule": record.source.schedule,
            "metadata": dict(record.source.metadata),
        },
    )


def _type(record: RunRecord, state: State, before: State | None) -> NoticeType:
    if state == "running":
        return "run.created" if before is None else "run.resumed"
    if record.source.api == "openai" and state in _OPENAI:
        return _OPENAI[state]
    return _ENDED[state]
