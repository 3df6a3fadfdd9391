"""Models and adapters resolved, for tests of either."""

import json
from pathlib import Path

import pytest
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.models.resolve import Resolve, ResolvedAdapter
from longshore.training import EngineName, Layout
from shared.errors import InvalidInput
from shared.runs.start import ModelRequest, ResolvedModel
from shared.settings import Settings
from shared.storage import artifacts


def resolve(
    config: Settings, uri: str | Path, layout: Layout | None = None, engine: EngineName = "megatron", **more
) -> ResolvedModel:
    request = ModelRequest(uri=str(uri), tenant="default", layout=layout or Layout(), engine=engine, **more)
    return ActivityEnvironment().run(Resolve(HostContext(config)).resolve_model, request)


def stage(config: Settings, resolved: ResolvedModel | ResolvedAdapter) -> Path:
    artifact = resolved.model if isinstance(resolved, ResolvedModel) else resolved.adapter
    return artifacts.stage(artifact, config.root_path / "cache", config.s3)


def refusal(
    config: Settings, uri: str | Path, layout: Layout | None = None, engine: EngineName = "megatron", **more
) -> str:
    with pytest.raises(InvalidInput) as refused:
        resolve(config, uri, layout, engine, **more)
    return str(refused.value)


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def names_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
