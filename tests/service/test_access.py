"""Where a tenant's URIs may lead, however they are written."""

from pathlib import Path

import pytest

from longshore.dataset_runs import SFTRun
from service.accounts.tenants import Access
from shared.errors import InvalidInput
from shared.settings import S3Settings, Settings
from shared.storage.store import open_store
from tests.service.conftest import sft


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for tenant in ("acme", "other"):
        folder = tmp_path / "root" / "store" / "tenants" / tenant
        folder.mkdir(parents=True)
        (folder / "rows.jsonl").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "root" / "store" / "tenants" / "other")
    return tmp_path / "root"


def refusal(access: Access, **changes) -> str | None:
    """The field that is refused, if one is."""
    try:
        access.check("acme", SFTRun.model_validate(sft(**changes)))
    except InvalidInput as error:
        return error.place
    return None


@pytest.mark.parametrize(
    "uri",
    [
        "file://{root}/store/tenants/other/rows.jsonl",
        "FILE://{root}/store/tenants/other/rows.jsonl",
        " file://{root}/store/tenants/other/rows.jsonl",
        "file://localhost{root}/store/tenants/other/rows.jsonl",
        "file://{root}/store/tenants/acme/../other/rows.jsonl",
        "file://{root}/store/tenants/acme/%2e%2e/other/rows.jsonl",
        "file://{root}/store/tenants/acme%2F..%2Fother/rows.jsonl",
        "file://{root}/store/tenants/%6fther/rows.jsonl",
        "file:{root}/store/tenants/other/rows.jsonl",
        "file://{root}/store/tenants/acme-2/rows.jsonl",
        "file://{root}/store/tenants/acme",
        "file://{root}/store/tenants",
        "file://{root}/store",
        "file://{root}",
        "file:///",
        "file://{root}/store/runs/sft-1/checkpoints/0001-1/step-1",
        "file://{root}/service/longshore.db",
        "file://{root}/cache/something",
        "file://{root}/../link/rows.jsonl",
        "{root}/store/tenants/other",
        "{root}/../link",
        "{root}/service/longshore.db",
    ],
)
def test_a_tenant_is_kept_out_of_what_is_not_its_own(uri: str, root: Path) -> None:
    settings = Settings(root=root)
    access = Access(settings, open_store(settings.store, settings.s3))
    uri = uri.format(root=root)
    assert refusal(access, dataset={"uri": uri}) == "dataset.uri"
    assert refusal(access, model=uri) == "model"
    assert refusal(access, initial_adapter=uri) == "initial_adapter"


@pytest.mark.parametrize(
    "uri",
    [
        "file://{root}/store/tenants/acme/rows.jsonl",
        "file://{root}/store/tenants/acme/uploads/",
        "{root}/store/tenants/acme/adapters/harbour/v000001",
        "file://{root}/../elsewhere/rows.jsonl",
        "file://{root}-2/rows.jsonl",
        "s3://bucket/tenants/other/rows.jsonl",
        "org/name@main",
        "/",
    ],
)
def test_everything_else_is_open(uri: str, root: Path) -> None:
    settings = Settings(root=root)
    access = Access(settings, open_store(settings.store, settings.s3))
    assert refusal(access, model=uri.format(root=root)) is None
    assert refusal(access, dataset={"uri": "https://example.com/tenants/other/rows.jsonl"}) is None


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("s3://bucket/our/store/tenants/other/rows.jsonl", "dataset.uri"),
        ("S3://bucket/our/store/tenants/other/rows.jsonl", "dataset.uri"),
        ("s3://bucket//our/store/tenants/other/rows.jsonl", "dataset.uri"),
        ("s3://bucket/our/store/%74enants/other/rows.jsonl", "dataset.uri"),
        ("s3://bucket/our/store/runs/sft-1/run.json", "dataset.uri"),
        ("s3://bucket/our/store", "dataset.uri"),
        ("s3://bucket/our/", "dataset.uri"),
        ("s3://bucket", "dataset.uri"),
        ("s3://bucket/our/store/tenants/acme/rows.jsonl", None),
        ("s3://bucket/our/storehouse/rows.jsonl", None),
        ("s3://other/our/store/tenants/other/rows.jsonl", None),
        ("file:///data/rows.jsonl", None),
    ],
)
def test_a_store_in_s3_is_kept_as_well(uri: str, place: str | None, tmp_path: Path) -> None:
    s3 = S3Settings(endpoint_url="http://127.0.0.1:9", region="us-east-1")
    settings = Settings(root=tmp_path, store_uri="s3://bucket/our/store", s3=s3)
    access = Access(settings, open_store(settings.store, settings.s3))
    assert refusal(access, dataset={"uri": uri}) == place
    assert refusal(access, dataset={"uri": f"file://{tmp_path}/service/longshore.db"}) == "dataset.uri"
