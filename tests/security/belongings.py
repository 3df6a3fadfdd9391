"""Every operation of our OpenAPI, and something of each kind that operations name by an id, all of one tenant's."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from shared import provenance
from shared.provenance import enveloped, statement_of
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.store import ObjectStore
from tests.service.conftest import Service, sft
from tests.service.stand_in import SUCCEEDS, WAITS
from tests.waiting import wait_until
from tests.workflows.published import publish

TENANT = "acme"
DATA = "file:///data/rows.jsonl"
STRING_CHECK = {"type": "string_check", "name": "g", "operation": "eq", "input": "a", "reference": "a"}
ROLLOUTS = {"prompts": {"uri": DATA}, "grader": STRING_CHECK, "steps": 2}
NIGHTLY = {"name": "nightly", "run": sft(kind="sft", dataset={"uri": DATA}), "cron": "0 2 1 1 *"}

SWEEP = {
    "name": "best",
    "run": sft(kind="sft", dataset={"uri": DATA}, seed=WAITS),
    "parameters": {"learning_rate": {"choices": [0.1]}},
    "sampler": "grid",
    "metric": "loss",
}

# What an operation is sent that demands a body: enough for the request to be understood.
BODIES: dict[str, Any] = {
    "/api/v1/runs": sft(seed=SUCCEEDS, kind="sft"),
    "/api/v1/runs/sft": sft(seed=SUCCEEDS),
    "/api/v1/runs/dpo": sft(seed=SUCCEEDS),
    "/api/v1/runs/distill": sft(seed=SUCCEEDS, teacher="file:///r"),
    "/api/v1/runs/reward": sft(seed=SUCCEEDS),
    "/api/v1/runs/rl": {"model": "org/tiny", "rollouts": ROLLOUTS},
    "/api/v1/runs/{run_id}/steps": {"key": "k", "groups": DATA},
    "/api/v1/runs/{run_id}/profiles": {"steps": 1},
    "/api/v1/sessions": {"model": "org/tiny"},
    "/api/v1/sessions/{run_id}/commands/{number}": {"kind": "save_state"},
    "/api/v1/validate": {"source": {"uri": DATA}, "model_uri": "org/tiny"},
    "/api/v1/preview": {"source": {"uri": DATA}, "model_uri": "org/tiny"},
    "/api/v1/estimate": sft(kind="sft", dataset={"uri": DATA}),
    "/api/v1/models/{model_id}/exports": {"format": "merged"},
    "/api/v1/codec/decode": {"payloads": [{"metadata": {"encoding": "anNvbi9wbGFpbg=="}, "data": "MQ=="}]},
    "/api/v1/keys": {},
    "/api/v1/tenants": {"tenant": "more"},
    "/api/v1/tenants/{tenant}/quotas": {},
    "/api/v1/webhooks": {"url": "https://example.invalid/hook"},
    "/api/v1/webhooks/{webhook_id}": {},
    "/api/v1/schedules": NIGHTLY,
    "/api/v1/schedules/{name}/backfill": {"begin": 0, "end": 1},
    "/api/v1/sweeps": SWEEP,
    "/api/v1/graders/run": {"grader": STRING_CHECK},
    "/api/v1/episodes": {"model": "harbour"},
    "/v1/uploads": {"filename": "a", "purpose": "fine-tune", "bytes": 1, "mime_type": "text/plain"},
    "/v1/uploads/{upload_id}/complete": {"part_ids": ["part_0"]},
    "/v1/fine_tuning/jobs": {"model": "org/tiny", "training_file": DATA},
    "/v1/fine_tuning/alpha/graders/run": {"grader": STRING_CHECK, "model_sample": "a"},
    "/v1/fine_tuning/alpha/graders/validate": {"grader": STRING_CHECK},
    "/v1/chat/completions": {"model": "harbour", "messages": [{"role": "user", "content": "?"}]},
    "/v1/completions": {"model": "harbour", "prompt": "?"},
    "/v1/responses": {"model": "harbour", "input": "?"},
    "/v1/messages": {"model": "harbour", "max_tokens": 1, "messages": [{"role": "user", "content": "?"}]},
    "/v1/messages/count_tokens": {"model": "harbour", "messages": [{"role": "user", "content": "?"}]},
    "/v1/preview/models": {"name": "m", "base_model": "tiny"},
    "/v1/preview/models/{model_id}/checkpoints": {"steps": [1]},
    "/v1/preview/sft-training-jobs": {"model_id": f"model-{'0' * 17}", "training_data_url": DATA},
    "/v1/preview/training-jobs": {"model_id": f"model-{'0' * 17}", "trajectory_groups": [{"trajectories": []}]},
}

# Which of a path's parameters stand for something that a tenant has, and what nobody's looks like.
NOBODYS = {
    "run_id": "sft-0000000000000-000000",
    "file_id": "file-000000000000000000000000",
    "upload_id": "upload_000000000000000000000000",
    "webhook_id": "wh-000000000000000000000000",
    "sweep_id": "sweep-00000000000000000",
    "episode_id": f"ep-{'0' * 24}",
    "name": "nobodys",
    "key_id": "key-000000000000",
    "model_id": "nobodys",
}
# The rest of a path: a place within what an id names.
PLACES = {"step": "1", "path": "README.md", "job_id": "000001", "fence": "e000001-a00", "tenant": TENANT, "number": "1"}
PLACES |= {"export": "fp8", "profile_id": "0" * 16}
ART_JOB = "/v1/preview/training-jobs/{job_id}"


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    takes: str | None

    @property
    def parameters(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.path)

    @property
    def names_an_id(self) -> bool:
        return bool(NOBODYS.keys() & set(self.parameters)) or self.path.startswith(ART_JOB)

    def ask(self, asking: httpx.Client, ids: dict[str, str]) -> httpx.Response:
        """Ask with these ids, and with a body that is understood."""
        path = self.path
        for name in self.parameters:
            path = path.replace(f"{{{name}}}", ids[name])
        sent: dict[str, Any] = {}
        match self.takes:
            case "application/json":
                assert self.path in BODIES, f"{self.path} takes a body: name one in BODIES"
                sent = {"json": BODIES[self.path]}
            case "multipart/form-data":
                sent = {"files": {"file": ("rows.jsonl", b"{}\n")}, "data": {"purpose": "fine-tune"}}
        if self.path.endswith("/parts"):
            sent = {"files": {"data": b"{}\n"}}
        if self.path == "/api/v1/files" and self.method == "POST":
            sent = {"params": {"name": "more.jsonl"}, "content": b"{}\n"}
        return asking.request(self.method, path, **sent)


def operations(document: dict[str, Any]) -> tuple[Operation, ...]:
    found = []
    for path, methods in document["paths"].items():
        for method, said in methods.items():
            body = said.get("requestBody", {})
            takes = next(iter(body["content"])) if body.get("required") else None
            found.append(Operation(method.upper(), path, takes))
    return tuple(found)


@dataclass(frozen=True)
class Belongings:
    """What a tenant has. `ids`: by the name of a path's parameter; `file_uri`: of its upload."""

    key: str
    ids: dict[str, str]
    openai_run: str
    session: str
    art_model: str | None
    art_run: str | None
    file_uri: str
    adapter_uri: str

    def ids_for(self, operation: Operation) -> dict[str, str]:
        ids = PLACES | self.ids
        if operation.path.startswith("/v1/fine_tuning/jobs"):
            ids["run_id"] = self.openai_run
        if operation.path.startswith("/api/v1/sessions"):
            ids["run_id"] = self.session
        if operation.path.startswith("/v1/preview"):
            assert self.art_model and self.art_run
            ids |= {"model_id": self.art_model, "job_id": self.art_run}
        return ids

    def nobodys_for(self, operation: Operation) -> dict[str, str]:
        ids = PLACES | NOBODYS
        if operation.path.startswith("/v1/preview"):
            ids |= {"model_id": f"model-{'0' * 17}", "job_id": NOBODYS["run_id"]}
        return ids


def new_tenant(service: Service, tenant: str) -> str:
    """Its first key."""
    with service.http() as operator:
        key: str = _made(operator.post("/tenants", json={"tenant": tenant}))["key"]["key"]
        return key


def acquire(service: Service, tiny_model: Path, paths: set[str], tenant: str = TENANT) -> Belongings:
    """A new tenant, with one of everything."""
    key = new_tenant(service, tenant)
    with httpx.Client(
        base_url=service.url, headers={"authorization": f"Bearer {key}"}, timeout=300, trust_env=False
    ) as acme:
        file = _made(acme.post("/api/v1/files", params={"name": "rows.jsonl"}, content=b'{"text": "ours"}\n'))
        upload_fields = BODIES["/v1/uploads"]
        ids = {
            "run_id": _made(acme.post("/api/v1/runs/sft", json=sft(seed=WAITS)))["run_id"],
            "file_id": file["file_id"],
            "upload_id": _made(acme.post("/v1/uploads", json=upload_fields))["id"],
            "webhook_id": _made(acme.post("/api/v1/webhooks", json=BODIES["/api/v1/webhooks"]))["id"],
            "name": _made(acme.post("/api/v1/schedules", json=NIGHTLY))["scheduled"]["name"],
            "key_id": _made(acme.post("/api/v1/keys", json={"title": "second"}))["key_id"],
            "model_id": "harbour",
        }
        ids["episode_id"] = _made(acme.post("/api/v1/episodes", json=BODIES["/api/v1/episodes"]))["episode_id"]
        ids["sweep_id"] = _made(acme.post("/api/v1/sweeps", json=SWEEP))["sweep_id"]
        wait_for_trials(acme)
        job = {"model": str(tiny_model), "training_file": file["uri"], "seed": WAITS}
        openai_run = _made(acme.post("/v1/fine_tuning/jobs", json=job))["id"]
        session = _made(acme.post("/api/v1/sessions", json={"model": tiny_model.as_uri()}))["run_id"]
        _made(acme.put(f"/api/v1/sessions/{session}/commands/1", json={"kind": "save_state"}))
        art_model = art_run = None
        if "/v1/preview/models" in paths:
            fields = {"name": "harbour", "base_model": tiny_model.as_uri()}
            art_model = _made(acme.post("/v1/preview/models", json=fields))["id"]
            asked = {"model_id": art_model, "training_data_url": file["uri"]}
            art_run = _made(acme.post("/v1/preview/sft-training-jobs", json=asked))["id"]
    adapter_uri = _published(service.store, tenant, service.settings.root_path / "made" / tenant)
    return Belongings(key, ids, openai_run, session, art_model, art_run, file["uri"], adapter_uri)


def wait_for_trials(asking: httpx.Client) -> None:
    """Until every sweep has begun its trials, and cancelled ones have ended: nothing more is made of them."""

    def are_settled() -> bool:
        views = asking.get("/api/v1/sweeps").json()
        return all(view["state"] != "running" or _goes_on(view) for view in views)

    wait_until(are_settled, "trials of sweeps")


def _goes_on(view: dict[str, Any]) -> bool:
    trials = view["trials"]
    return len(trials) == view["num_trials"] and all(trial["state"] == "running" for trial in trials)


def _made(answer: httpx.Response) -> dict[str, Any]:
    assert answer.is_success, (answer.request.url, answer.text)
    made: dict[str, Any] = answer.json()
    return made


def _published(store: ObjectStore, tenant: str, folder: Path) -> str:
    """An adapter of the tenant's, called harbour; its URI."""
    for name, text in (("model/config.json", "{}"), ("adapter/adapter_model.safetensors", "weights")):
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    seal(folder / "model")
    model = upload_artifact(store, f"tenants/{tenant}/models/tiny", folder / "model")
    publish(store, folder / "adapter", "harbour", model, tenant=tenant)
    place = f"tenants/{tenant}/adapters/harbour/v000001"
    signed = enveloped(statement_of([], place, f"{tenant}-run", {})).model_dump_json()
    store.put_bytes(f"{place}/{provenance.NAME}", signed.encode())
    return model.uri.replace("/models/tiny", "/adapters/harbour/v000001")
