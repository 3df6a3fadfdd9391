"""What was published, deleted again: one version or a whole name, and nothing beside it."""

from pathlib import Path

import httpx
import pytest

from service.inference.published_models import PublishedModels
from shared.errors import InvalidInput, NotFound
from shared.storage.paths import version_claim
from shared.storage.store import LocalStore, ObjectStore
from tests.service.conftest import KEY, Service, put_versions

NAMES = {"harbour": 3, "harbour-2": 1}


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    store = LocalStore(tmp_path / "store")
    publish(store, tmp_path)
    return store


def publish(store: ObjectStore, folder: Path) -> None:
    for name, num_versions in NAMES.items():
        put_versions(store, "default", name, folder / "artifact", num_versions, num_versions)


def test_a_version_goes_and_the_others_stay(store: ObjectStore) -> None:
    models = PublishedModels(store)
    models.delete_model("default", "harbour:v3")
    assert (models.versions("default", "harbour"), models.find("default", "harbour").version) == ([1, 2], 2)
    with pytest.raises(NotFound):
        models.delete_model("default", "harbour:v3")
    assert store.head(version_claim("default", "adapters", "harbour", 3)), "its number is not given again"


def test_a_name_goes_with_all_its_versions_and_no_longer_name(store: ObjectStore) -> None:
    models = PublishedModels(store)
    models.delete_model("default", "harbour")
    assert (models.versions("default", "harbour"), models.versions("default", "harbour-2")) == ([], [1])
    assert not [item.key for item in store.list("tenants/") if "/harbour/" in item.key and "/claims/" not in item.key]
    with pytest.raises(NotFound):
        models.find("default", "harbour")


def test_what_is_another_tenants_or_a_runs_own_stays(store: ObjectStore) -> None:
    models = PublishedModels(store)
    with pytest.raises(NotFound):
        models.delete_model("acme", "harbour")
    with pytest.raises(InvalidInput, match="run"):
        models.delete_model("default", "sft-0123456789abcdef0:step-3")
    assert models.versions("default", "harbour") == [1, 2, 3]


def test_a_client_deletes_a_model(service: Service, tmp_path: Path) -> None:
    publish(service.store, tmp_path)
    with service.http() as admin:
        asks = admin.post("/keys", json={"title": "asks", "scopes": ["inference"]}).json()["key"]

    def delete(key: str) -> httpx.Response:
        return httpx.delete(f"{service.url}/v1/models/harbour", headers={"authorization": f"Bearer {key}"})

    assert delete(asks).status_code == 403
    assert delete(KEY).json() == {"id": "harbour", "object": "model", "deleted": True}
    assert delete(KEY).status_code == 404


def test_a_request_sent_again_is_the_same_though_a_newer_version_came(service: Service, tmp_path: Path) -> None:
    """A name without a version is the newest: of two attempts at one job the second finds the first's."""

    def sent(seed: int = 1) -> httpx.Response:
        request = {"model": "tide", "training_file": f"file://{tmp_path}/chats.jsonl", "seed": seed}
        headers = {"authorization": f"Bearer {KEY}", "idempotency-key": "tide, tonight"}
        return httpx.post(f"{service.url}/v1/fine_tuning/jobs", json=request, headers=headers)

    def publish_models(num: int) -> None:
        put_versions(service.store, "default", "tide", tmp_path / "artifact", num, num, kind="models")

    publish_models(1)
    first = sent().json()
    publish_models(2)
    assert sent().json()["id"] == first["id"]
    assert sent(seed=2).json()["error"]["param"] == "Idempotency-Key", "another request"
