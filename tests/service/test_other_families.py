"""Models of families that no engine of ours but fsdp may train: shown and asked, and refused where another trains."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import httpx
import pytest

from megatron_worker.sampler.vllm import tells_routes
from service.app import create_app
from shared.errors import InvalidInput
from tests.service.conftest import KEY, Service


@pytest.fixture(scope="module")
def other(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("models") / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "olmo2"}))
    return folder


async def test_it_is_asked_untrained(service: Service, other: Path) -> None:
    models = create_app(service.settings).state.backend.untrained
    assert (await models.target("default", other.as_uri())).base == other.as_uri()
    with pytest.raises(InvalidInput, match=r"'olmo2' is not a known family: .*qwen3,.*; the engine fsdp takes"):
        await models.resolve("default", other.as_uri(), "megatron")


def test_its_rows_are_shown(api: httpx.Client, other: Path) -> None:
    (other / "rows.jsonl").write_text('{"text": "The harbour opens at dawn."}\n')
    asked = {"source": {"uri": (other / "rows.jsonl").as_uri()}, "model_uri": other.as_uri()}
    shown = api.post("/preview", json=asked)
    assert shown.status_code == 200 and shown.json()["report"]["num_kept"] == 1, shown.text


def test_a_model_of_art_is_registered_for_the_engine_that_takes_it(service: Service, other: Path) -> None:
    bearer = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=f"{service.url}/v1/preview", headers=bearer, timeout=300, trust_env=False) as art:
        fields = {"project": "harbour", "name": "other", "base_model": other.as_uri()}
        refused = art.post("/models", json=fields)
        assert refused.status_code == 400 and "is not a known family" in refused.text, refused.text
        taken = art.post("/models", json={**fields, "longshore": {"engine": "fsdp"}})
        assert taken.status_code == 200, taken.text


def test_vllm_is_asked_for_no_routes_of_it(other: Path) -> None:
    assert not tells_routes(Namespace(tell_routes=True, model=other))
