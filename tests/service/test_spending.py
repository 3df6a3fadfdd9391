"""What runs cost, and the limit of that: it pauses a tenant's runs, outlives the service, and lets them go on."""

import time
from collections.abc import Iterator

import httpx
import pytest

from longshore.dataset_runs import SFTRun
from longshore.runs import RunRecord
from longshore.views import RunStatus
from service.database.engine import open_database
from service.runs.rows import run_row
from shared.settings import PriceSettings, Settings
from tests.service.conftest import Service, key_of_acme, reaches, serving, settings_below, sft, started
from tests.service.stand_in import WAITS

HOURS, PRICE = 3.0, 2.0


@pytest.fixture(scope="module")
def settings(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    root = tmp_path_factory.mktemp("spending")
    return settings_below(root, temporal_address).model_copy(update={"prices": PriceSettings(gpu_hour=PRICE)})


@pytest.fixture(scope="module")
def spent(service: Service, acme: str) -> Iterator[None]:
    """A run of acme's that ended an hour ago, after three GPU hours."""
    record = RunRecord(
        run_id="sft-spent", tenant="acme", run=SFTRun.model_validate(sft()), created_at=time.time() - 9999
    )
    status = RunStatus(
        run_id="sft-spent", state="succeeded", phase="done", ended_at=time.time() - 3600, gpu_seconds=3600 * HOURS
    )
    database = open_database(service.settings)
    database.write(lambda session: session.add(run_row(record, status)))
    yield
    database.close()


def limit(operator: httpx.Client, spending: float | None) -> None:
    quotas = {} if spending is None else {"spending": spending}
    assert operator.put("/tenants/acme/quotas", json=quotas).status_code == 200


def test_costs_are_shown(service: Service, api: httpx.Client, theirs: httpx.Client, spent: None) -> None:
    view = theirs.get("/runs/sft-spent").json()
    assert view["cost"] == {"currency": "USD", "so_far": 6.0, "estimated": 6.0}
    usage = theirs.get("/usage").json()
    assert (usage["cost"], usage["currency"]) == (6.0, "USD")
    going_on = reaches(theirs, started(theirs, seed=WAITS), "running")
    assert going_on["cost"]["so_far"] == 0 and 1.9 < going_on["cost"]["estimated"] <= 2.0  # an hour is left, of a rank
    theirs.post(f"/runs/{going_on['run_id']}/cancel")


def test_a_limit_pauses_runs_until_it_is_raised(
    settings: Settings, service: Service, api: httpx.Client, acme: str, theirs: httpx.Client, spent: None
) -> None:
    ours, own_pause, run_id = started(api, seed=WAITS), started(theirs, seed=WAITS), started(theirs, seed=WAITS)
    theirs.post(f"/runs/{own_pause}/pause")
    reaches(theirs, own_pause, "paused")
    limit(api, 5.5)
    paused = reaches(theirs, run_id, "paused")
    said = "acme's runs of the last 30 days cost 6.00 USD, and may cost 5.5 USD"
    assert paused["paused_by"] == f"quota spending: {said}"
    assert said in service.cli("get", run_id, LONGSHORE_API_KEY=acme).stdout
    for answer in (theirs.post("/runs/sft", json=sft()), theirs.post(f"/runs/{run_id}/resume")):
        assert answer.status_code == 429 and "quota spending: acme's runs" in answer.json()["error"]["message"]
    assert api.get(f"/runs/{ours}").json()["state"] == "running"

    with serving(settings) as other, other.http() as operator:  # another service, which remembers nothing
        limit(operator, 6.5)
        with other.http(acme) as client:
            assert reaches(client, run_id, "succeeded")["paused_by"] is None
            assert client.get(f"/runs/{own_pause}").json()["state"] == "paused", "a user paused it, and no limit"
        limit(operator, None)
    api.post(f"/runs/{ours}/cancel")


def test_a_limit_needs_a_price(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    unpriced = settings_below(tmp_path_factory.mktemp("unpriced"), temporal_address)
    with serving(unpriced) as service, service.http() as operator:
        key_of_acme(service)
        answer = operator.put("/tenants/acme/quotas", json={"spending": 5})
        assert answer.status_code == 422 and answer.json()["error"]["place"] == "spending"
        assert operator.get("/usage").json()["cost"] is None
