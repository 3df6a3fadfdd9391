"""Longshore for programs: `Client` and `AsyncClient` do what its API does; the models of requests are beside them.

Each name is imported when it is asked for: workers and hosts import this package for a few of its models.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longshore.accounts import KeyRequest, QuotaSettings, TenantRequest
    from longshore.automation import (
        Backfill,
        Halving,
        Rotation,
        ScheduledRun,
        Space,
        Sweep,
        WebhookChange,
        WebhookChoice,
    )
    from longshore.client import (
        AsyncClient,
        Client,
        CommandFailed,
        Conflict,
        DownloadFailed,
        Forbidden,
        Invalid,
        NotFound,
        Pending,
        ServiceError,
        Session,
        TooMany,
        Unauthorized,
        Unreachable,
        show_progress,
    )
    from longshore.commands import Datum
    from longshore.dataset_runs import DatasetSource, DistillRun, DPORun, RewardRun, SFTRun
    from longshore.runs import HeldOut, RLRun, Rollouts, Run
    from longshore.training import Adam, Full, Layout, Lora, Muon, ScalarHead, SessionRun
    from longshore.views import EpisodeRequest, EpisodeSampling, Export, PreviewRequest

_MODULES = ("client", "dataset_runs", "runs", "training", "commands", "automation", "accounts", "views")
# fmt: off
__all__ = (
    "Adam", "AsyncClient", "Backfill", "Client", "CommandFailed", "Conflict", "DPORun", "DatasetSource", "Datum",
    "DistillRun", "DownloadFailed", "EpisodeRequest", "EpisodeSampling", "Export", "Forbidden", "Full", "Halving",
    "HeldOut", "Invalid", "KeyRequest", "Layout", "Lora", "Muon", "NotFound", "Pending", "PreviewRequest",
    "QuotaSettings", "RLRun", "RewardRun", "Rollouts", "Rotation", "Run", "SFTRun", "ScalarHead", "ScheduledRun",
    "ServiceError", "Session", "SessionRun", "Space", "Sweep", "TenantRequest", "TooMany", "Unauthorized",
    "Unreachable", "WebhookChange", "WebhookChoice", "show_progress",
)
# fmt: on


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'longshore' has no attribute {name!r}")
    modules = (import_module(f"longshore.{module}") for module in _MODULES)
    return next(getattr(module, name) for module in modules if hasattr(module, name))
