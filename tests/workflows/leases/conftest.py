"""Hosts that answer questions to published adapters, for the tests of a file."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.workflows.leases.harbour import Harbour, started


@pytest.fixture(scope="module")
async def harbour(
    temporal_address: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Harbour]:
    async with started(temporal_address, tiny_model, tmp_path_factory.mktemp("harbour")) as harbour:
        yield harbour
