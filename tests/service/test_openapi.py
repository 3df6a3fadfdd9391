"""What our OpenAPI says, the service does: schemathesis asks operations of all surfaces by all of its checks."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.settings import DownloadSettings, RateLimitSettings, Settings
from tests.service.conftest import KEY, Service, polling, serving

# Parameters that only ask for time.
CONFIGURATION = """
[parameters]
"query.wait_s" = 0
"query.follow" = false

[generation]
allow-x00 = true
"""

# Whether a request is good is decided here by rules that JSON Schema has no words for, or none that a generator could
# follow. Of these alone it is not asked that whatever fits the schema is taken; all other checks are made of them too.
HAS_MORE_RULES = {
    r"POST /api/v1/runs(/(sft|dpo|distill|reward|rl))?": "numbers that must fit: layout, epochs or steps, losses",
    r"POST /api/v1/estimate": "the same; and a model and data that can be brought",
    r"POST /api/v1/(validate|preview)": "a model and data that can be brought",
    r"POST /api/v1/sessions": "a published name, where the model is one",
    r"POST /api/v1/keys": "a moment that lies ahead",
    r"PUT /api/v1/tenants/{tenant}/quotas": "`spending`, where GPU hours have a price",
    r"POST /api/v1/graders/run": "regular expressions, templates and expressions that can be compiled; a server",
    r"POST /v1/fine_tuning/alpha/graders/.*": "the same",
    r"POST /api/v1/webhooks|PATCH /api/v1/webhooks/{webhook_id}": "a host and a port as URLs have them",
    r"POST /api/v1/schedules": "a cron expression, a time zone; and the rules of runs",
    r"POST /api/v1/sweeps": "fields that the run has, and values that it takes; and the rules of runs",
    r"POST /api/v1/schedules/{name}/backfill": "a span that has passed, and ends after it begins",
    r"GET /api/v1/runs/{run_id}/events": "a cursor that was told before",
    r"GET /v1/(files|fine_tuning/jobs(/{run_id}/(events|checkpoints))?)": "the same: `after`",
    r"GET /v1/preview/(models(/{model_id}/checkpoints)?|training-jobs/{job_id}/events)": "the same",
    r"GET /api/v1/runs/{run_id}/steps": "the same",
    r"POST /v1/(files|uploads/{upload_id}/parts)": "a form as multipart has it",
    r"POST /v1/uploads/{upload_id}/complete": "parts that are there",
    r"POST /v1/uploads": "a plain file name, and as many bytes as are taken here",
    r"POST /v1/fine_tuning/jobs": "files that are there; and the rules of runs",
    r"POST /v1/((chat/)?completions|responses|messages.*)": "messages as chat templates take them",
    r"POST /v1/preview/.*": "trajectories, and data that can be brought; and the rules of runs",
}
# Every operation, by one example of each kind (good, and bad in one way): less than 20 s. LONGSHORE_TEST_OPERATIONS=all
# adds what takes minutes: every boundary of every field, sequences of operations, and examples until the time is over.
QUICK = ("--phases", "fuzzing", "--max-examples", "1")
MAX_S = os.environ.get("LONGSHORE_TEST_MAX_S", "400")
THOROUGH = ("--phases", "examples,coverage,fuzzing,stateful", "--max-examples", "2", "--max-time", MAX_S)


@pytest.fixture
def service(temporal_address: str, tmp_path: Path) -> Iterator[Service]:
    """One of its own: what is asked here fills lists, and is nobody's count of runs."""
    settings = Settings(
        root=tmp_path / "root",
        temporal_address=temporal_address,
        control_queue=f"control-openapi-{os.getpid()}",
        download=DownloadSettings(file_roots=(tmp_path,), timeout_s=2),
        rate_limit=RateLimitSettings(per_s=100_000, burst=100_000),
        temporal_codec=True,
    )
    with serving(settings) as service, polling(settings):
        yield service


@pytest.mark.slow
def test_operations_do_what_their_description_says(service: Service, tmp_path: Path) -> None:
    seed = os.environ.get("LONGSHORE_TEST_REQUESTS_SEED") or "5"
    effort = THOROUGH if os.environ.get("LONGSHORE_TEST_OPERATIONS") == "all" else QUICK
    with service.http() as api:
        described = api.get("/openapi.json").json()["paths"]
    names = [f"{method.upper()} {path}" for path, methods in described.items() for method in methods]
    assert all(any(re.fullmatch(pattern, name) for name in names) for pattern in HAS_MORE_RULES)
    exceptions = [name for name in names if any(re.fullmatch(pattern, name) for pattern in HAS_MORE_RULES)]
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION + "".join(map(_without_acceptance, exceptions)))
    log = tmp_path / "schemathesis.log"
    print(f"LONGSHORE_TEST_REQUESTS_SEED={seed} repeats this; schemathesis writes {log}")
    with log.open("wb") as file:
        code = subprocess.call(
            [
                *(str(Path(sys.executable).parent / "schemathesis"), "run", f"{service.url}/api/v1/openapi.json"),
                *("--header", f"Authorization: Bearer {KEY}", "--request-timeout", "60", *effort),
                *("--seed", seed, "--generation-database", "none", "--no-shrink", "--continue-on-failure"),
                *("--no-color", "--warnings", "off"),
            ],
            cwd=tmp_path,
            stdout=file,
            stderr=file,
            timeout=float(MAX_S) + 180,
        )
    said = log.read_text()
    assert code == 0, said[-20_000:]
    assert re.search(rf"Tested: {len(names)}$", said, re.MULTILINE), said[-20_000:]


def _without_acceptance(name: str) -> str:
    return f'\n[[operations]]\ninclude-name = "{name}"\nchecks.positive_data_acceptance.enabled = false\n'
