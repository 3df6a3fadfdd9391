"""Two tenants on one stack as users start it: real Temporal, service and hosts. One of them attacks.

The stack is bounded (bounds.py), and asks servers on loopback too: what an attacker has in the network is played there.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.storage.artifacts import seal, upload_artifact
from shared.storage.paths import published_version
from shared.storage.store import LocalStore
from tests.end_to_end.stack import Stack, started
from tests.security.attacks.bounds import CONFINED_BYTES, Bounds, bounded
from tests.security.attacks.tenants import Tenant
from tests.workflows.published import publish


@pytest.fixture(scope="session")
def open_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one folder of this machine that the operator has opened to tenants (download.file_roots)."""
    return tmp_path_factory.mktemp("open").resolve()


@pytest.fixture(scope="session")
def hub_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF_HOME of the stack's processes. Its cache is empty, and the hub is out of their reach (HF_HUB_OFFLINE)."""
    return tmp_path_factory.mktemp("hub").resolve()


@pytest.fixture(scope="session")
def stack(
    tmp_path_factory: pytest.TempPathFactory, open_folder: Path, hub_home: Path, tiny_model: Path
) -> Iterator[Stack]:
    settings = {
        "LONGSHORE_DOWNLOAD__FILE_ROOTS": json.dumps([str(open_folder), str(tiny_model)]),
        "LONGSHORE_DOWNLOAD__ALLOW_PRIVATE_ADDRESSES": "true",
        "LONGSHORE_RATE_LIMIT__PER_S": "10000",
        "LONGSHORE_RATE_LIMIT__BURST": "10000",
        "LONGSHORE_CPU_THREADS": "1",
        "LONGSHORE_WORKER_IDLE_S": "5",
        "LONGSHORE_CONFINED__MEMORY_BYTES": str(CONFINED_BYTES),
        "HF_HOME": str(hub_home),
    }
    with started(tmp_path_factory.mktemp("attacked"), **settings) as stack:
        yield stack


@pytest.fixture(scope="session")
def _bounds(stack: Stack) -> Iterator[Bounds]:
    with bounded(stack) as bounds:
        yield bounds


@pytest.fixture(autouse=True)
def within_bounds(_bounds: Bounds) -> Iterator[None]:
    """Every attack of this folder fails the test when the stack had to be stopped from taking the machine."""
    _bounds.broken = None
    yield
    assert _bounds.broken is None, _bounds.broken


@pytest.fixture(scope="session")
def operator(stack: Stack) -> Tenant:
    """The first tenant's admin, who made the others."""
    connection = stack.connection
    return Tenant(connection.api_url, "default", connection.api_key)


@pytest.fixture(scope="session")
def victim(operator: Tenant) -> Tenant:
    return _made(operator, "victim")


@pytest.fixture(scope="session")
def attacker(operator: Tenant) -> Tenant:
    return _made(operator, "attacker")


def _made(operator: Tenant, name: str) -> Tenant:
    made: httpx.Response = operator.http.post("/api/v1/tenants", json={"tenant": name})
    assert made.status_code == 201, made.text
    return Tenant(operator.url, name, made.json()["key"]["key"])


@pytest.fixture(scope="session")
def secret_model(stack: Stack, victim: Tenant, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the victim has published, as a run leaves it: its folder in the store."""
    folder = tmp_path_factory.mktemp("secret") / "model"
    shutil.copytree(tiny_model, folder)
    store = LocalStore(stack.root / "store")
    model = upload_artifact(store, "models/imported/00000000000000000000000000000000", _sealed(folder))
    version = publish(store, folder, "secret", model, tenant=victim.name, kind="models")
    return stack.root / "store" / published_version(victim.name, "models", "secret", version)


def _sealed(folder: Path) -> Path:
    seal(folder)
    return folder
