"""One service for the whole folder, and two tenants: the first one, and acme, which owns something of everything."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.settings import DownloadSettings, RateLimitSettings, Settings
from tests.security.belongings import Belongings, Operation, acquire, new_tenant, operations
from tests.service.conftest import (
    Service,
    no_store_request_within_a_transaction,
    polling,
    serving,
    watched_transactions,
)

__all__ = ["no_store_request_within_a_transaction", "watched_transactions"]


@pytest.fixture(scope="session")
def service(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("security")
    settings = Settings(
        root=root,
        temporal_address=temporal_address,
        control_queue=f"control-{root.name}",
        download=DownloadSettings(file_roots=(root.parent,)),
        rate_limit=RateLimitSettings(per_s=10_000, burst=10_000),
        temporal_codec=True,
    )
    with serving(settings) as service, polling(settings):
        yield service


@pytest.fixture(scope="session")
def walk(service: Service) -> tuple[Operation, ...]:
    """Every operation of every surface that our OpenAPI describes."""
    with service.http() as api:
        return operations(api.get("/openapi.json").json())


@pytest.fixture(scope="session")
def belongings(service: Service, tiny_model: Path, walk: tuple[Operation, ...]) -> Belongings:
    return acquire(service, tiny_model, {operation.path for operation in walk})


@pytest.fixture
def owner(service: Service, belongings: Belongings) -> Iterator[httpx.Client]:
    """acme's admin."""
    with client(service, belongings.key) as asking:
        yield asking


@pytest.fixture(scope="session")
def strangers_key(service: Service) -> str:
    return new_tenant(service, "strangers")


@pytest.fixture
def stranger(service: Service, strangers_key: str) -> Iterator[httpx.Client]:
    """Another tenant's admin, who is not the operator."""
    with client(service, strangers_key) as asking:
        yield asking


def client(service: Service, key: str) -> httpx.Client:
    """Asks any surface."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=service.url, headers=headers, timeout=300, trust_env=False)
