"""No route of any surface tells one tenant of another, by id, URI or cursor. New routes are taken in by the walk."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from longshore.fields import Fence
from shared.storage.artifacts import Manifest
from shared.storage.paths import MANIFEST, RunKeys
from tests.security.belongings import BODIES, NOBODYS, PLACES, ROLLOUTS, STRING_CHECK, TENANT, Belongings, Operation
from tests.service.conftest import Service, sft


def test_every_parameter_of_a_path_is_known_to_these_tests(walk: tuple[Operation, ...]) -> None:
    """A new one must be said to be an id, of which `acquire` makes one, or a place within something."""
    names = {name for operation in walk for name in operation.parameters}
    assert names <= NOBODYS.keys() | PLACES.keys()
    assert len(walk) >= 70


def test_another_tenants_id_is_as_good_as_nobodys(
    walk: tuple[Operation, ...], belongings: Belongings, owner: httpx.Client, stranger: httpx.Client
) -> None:
    tried, wrong = 0, []
    for operation in walk:
        if not operation.names_an_id:
            continue
        theirs, nobodys = belongings.ids_for(operation), belongings.nobodys_for(operation)
        answers = [operation.ask(stranger, ids) for ids in (theirs, nobodys)]
        said = [_without(answer.text, ids) for answer, ids in zip(answers, (theirs, nobodys), strict=True)]
        if [answer.status_code for answer in answers] != [404, 404] or said[0] != said[1]:
            wrong.append((operation, [answer.status_code for answer in answers], said))
        tried += 1
    assert wrong == []
    assert tried >= 50
    for operation in walk:  # the same ids in their owner's hands: so a 404 above says whose they are
        names = set(operation.parameters)
        if operation.method == "GET" and operation.names_an_id and not names & PLACES.keys() - {"step"}:
            answer = operation.ask(owner, belongings.ids_for(operation))
            if names == {"run_id"} or len(names) == 1:
                assert answer.status_code != 404, (operation, answer.text)


def _without(text: str, ids: dict[str, str]) -> str:
    for value in sorted(ids.values(), key=len, reverse=True):
        text = text.replace(value, "…")
    return text


def test_lists_and_cursors_tell_nothing(
    belongings: Belongings, owner: httpx.Client, stranger: httpx.Client, walk: tuple[Operation, ...]
) -> None:
    """Every GET without an id, asked by a stranger, names nothing of acme's; and its ids are no cursors."""
    marks = [
        *belongings.ids.values(),
        belongings.openai_run,
        belongings.session,
        belongings.art_model,
        belongings.art_run,
    ]
    marks = [mark for mark in marks if mark and mark not in ("nightly", "harbour")]
    lists = [operation.path for operation in walk if operation.method == "GET" and not operation.parameters]
    lists.remove("/api/v1/audit")  # it tells a stranger which ids the stranger has tried
    assert len(lists) >= 14
    seen = ""
    for path in lists:
        params: dict[str, Any] = {"limit": 100}
        if path == "/api/v1/sparklines":
            params["run_id"] = belongings.ids["run_id"]
        text = stranger.get(path, params=params).text
        assert not [mark for mark in marks if mark in text], path
        seen += owner.get(path, params=params).text
    uploads = (belongings.ids["upload_id"],)  # nothing lists these
    assert [mark for mark in marks if mark not in seen and mark not in uploads] == []
    who = stranger.get("/api/v1/whoami").json()["key_id"]
    assert {entry["key_id"] for entry in stranger.get("/api/v1/audit").json()["entries"]} == {who}
    for path, cursor in (
        ("/api/v1/runs", belongings.ids["run_id"]),
        ("/api/v1/files", belongings.ids["file_id"]),
        ("/v1/files", belongings.ids["file_id"]),
        ("/v1/fine_tuning/jobs", belongings.openai_run),
        ("/api/v1/sessions", belongings.session),
    ):
        theirs, nobodys = (stranger.get(path, params={"after": after}) for after in (cursor, "sft-0"))
        assert theirs.status_code == nobodys.status_code, path
        assert theirs.text.replace(cursor, "") == nobodys.text.replace("sft-0", ""), path


def test_ids_in_bodies_are_nobodys_as_well(belongings: Belongings, stranger: httpx.Client) -> None:
    hello = [{"role": "user", "content": "hello"}]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/fine_tuning/jobs", {"model": "org/tiny", "training_file": belongings.ids["file_id"]}),
        ("/v1/chat/completions", {"model": "harbour", "messages": hello}),
        ("/v1/completions", {"model": "harbour:v1", "prompt": "hello"}),
    ]
    if belongings.art_model:
        body = BODIES["/v1/preview/sft-training-jobs"] | {"model_id": belongings.art_model}
        asked.append(("/v1/preview/sft-training-jobs", body))
        groups = {"trajectory_groups": [{"trajectories": []}]}
        asked.append(("/v1/preview/training-jobs", {"model_id": belongings.art_model} | groups))
    for path, body in asked:
        answer = stranger.post(path, json=body)
        assert answer.status_code in (400, 404), (path, answer.text)
        assert "no" in answer.json()["error"]["message"].lower(), answer.text
    assert stranger.get("/v1/models").json()["data"] == []


def test_the_tenants_of_others_are_the_operators_affair(
    walk: tuple[Operation, ...], owner: httpx.Client, stranger: httpx.Client
) -> None:
    operators = ("/api/v1/tenants", "/api/v1/codec", "/api/v1/gc")
    of_tenants = [each for each in walk if each.path.startswith(operators)]
    assert len(of_tenants) >= 5
    for operation in of_tenants:
        for asking in (owner, stranger):
            for tenant in (TENANT, "default", "nobody"):
                assert operation.ask(asking, {"tenant": tenant}).status_code == 403, operation


# URIs.

RUNS = tuple(f"/api/v1/runs/{kind}" for kind in ("sft", "dpo", "distill", "reward", "rl"))
RICH: dict[str, Any] = {
    "/api/v1/runs": sft(kind="dpo", eval_dataset={"uri": "file:///e"}, reference="file:///r"),
    "/api/v1/runs/sft": sft(
        dataset=["file:///d", {"uri": "file:///d", "name": "second"}],
        eval_datasets={"held": {"uri": "file:///e"}},
        initial_adapter="file:///a",
    ),
    "/api/v1/runs/dpo": sft(eval_dataset={"uri": "file:///e"}, initial_adapter="file:///a", reference="file:///r"),
    "/api/v1/runs/distill": sft(
        eval_dataset={"uri": "file:///e"},
        initial_adapter="file:///a",
        teacher="file:///r",
        teachers={"more": "file:///m"},
        tokens="drawn",
    ),
    "/api/v1/runs/reward": sft(eval_dataset={"uri": "file:///e"}, initial_adapter="file:///a"),
    "/api/v1/runs/rl": {
        "model": "org/tiny",
        "initial_adapter": "file:///a",
        "rollouts": ROLLOUTS
        | {"sampler_url": "https://example.com/v1"}
        | {"prompts": [{"uri": "file:///p"}, {"uri": "file:///q", "weight": 2}]}
        | {"held_out": {"sets": {"held": {"uri": "file:///e"}}}}
        | {
            "grader": {
                "type": "score_model",
                "name": "judge",
                "model": "m",
                "input": [{"role": "user", "content": "{{ item.q }}"}],
                "base_url": "https://example.com/v1",
            }
        },
    },
    "/api/v1/validate": BODIES["/api/v1/validate"],
    "/api/v1/preview": BODIES["/api/v1/preview"],
    "/api/v1/schedules": BODIES["/api/v1/schedules"]
    | {"run": BODIES["/api/v1/schedules"]["run"] | {"dataset": [{"uri": "file:///d"}, {"uri": "file:///e"}]}},
    "/api/v1/sweeps": BODIES["/api/v1/sweeps"] | {"parameters": {"dataset.uri": {"choices": ["file:///d"]}}},
    "/api/v1/graders/run": {"grader": STRING_CHECK, "sample": {"sample": {"output_text": "a"}, "item": {"q": "a"}}},
    "/v1/fine_tuning/jobs": BODIES["/v1/fine_tuning/jobs"]
    | {"validation_file": "file:///e", "method": {"type": "dpo"}, "longshore": {"reference": "file:///r"}},
    "/v1/preview/models": {"base_model": "tiny"},
    "/v1/preview/sft-training-jobs": BODIES["/v1/preview/sft-training-jobs"],
}
MUST_REFUSE = {
    "/api/v1/runs": {"model", "dataset.uri", "eval_dataset.uri", "reference"},
    "/api/v1/runs/sft": {*("model", "dataset.0", "dataset.1.uri", "eval_datasets.held.uri", "initial_adapter")},
    "/api/v1/runs/dpo": {"model", "dataset.uri", "eval_dataset.uri", "initial_adapter", "reference"},
    "/api/v1/runs/distill": {
        *("model", "dataset.uri", "eval_dataset.uri", "initial_adapter", "teacher", "teachers.more")
    },
    "/api/v1/runs/reward": {"model", "dataset.uri", "eval_dataset.uri", "initial_adapter"},
    "/api/v1/runs/rl": {
        *("model", "initial_adapter", "rollouts.prompts.0.uri", "rollouts.prompts.1.uri", "rollouts.sampler_url"),
        "rollouts.held_out.sets.held.uri",
    },
    "/api/v1/validate": {"source.uri", "model_uri"},
    "/api/v1/preview": {"source.uri", "model_uri"},
    "/api/v1/schedules": {"run.model", "run.dataset.0.uri", "run.dataset.1.uri"},
    "/api/v1/sweeps": {"run.model", "run.dataset.uri", "parameters.dataset.uri.choices.0"},
    "/v1/fine_tuning/jobs": {"model", "training_file", "validation_file", "longshore.reference"},
    "/v1/preview/models": {"base_model"},
}


@pytest.mark.parametrize("path", RICH)
def test_every_uri_field_is_kept_out_of_what_is_anothers(
    path: str, walk: tuple[Operation, ...], belongings: Belongings, stranger: httpx.Client
) -> None:
    """Each string of a rich request in turn leads into acme's folder: the field is named, and nothing begun."""
    if path not in {operation.path for operation in walk}:
        pytest.skip(f"{path} is not served yet")
    body, refused = RICH[path], set()
    for place in _strings(body):
        for uri in (belongings.file_uri, belongings.adapter_uri.removeprefix("file://")):
            answer = stranger.post(path, json=_with(body, place, uri))
            assert not answer.is_success and answer.status_code < 500, (place, answer.text)
            error = answer.json()["error"]
            if "store" in error["message"] and "nothing of yours" in error["message"]:
                refused.add(".".join(map(str, place)))
    assert MUST_REFUSE.get(path, set()) <= refused
    assert stranger.get("/api/v1/runs").json()["runs"] == []


def _strings(value: Any, place: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    match value:
        case str():
            return [place]
        case dict():
            return [found for name, item in value.items() for found in _strings(item, (*place, name))]
        case list():
            return [found for number, item in enumerate(value) for found in _strings(item, (*place, number))]
        case _:
            return []


def _with(body: Any, place: tuple[str | int, ...], value: str) -> Any:
    """A copy of a body with another string at a place."""
    if not place:
        return value
    first, rest = place[0], place[1:]
    if isinstance(body, list):
        return [_with(item, rest, value) if number == first else item for number, item in enumerate(body)]
    return {name: _with(item, rest, value) if name == first else item for name, item in body.items()}


@pytest.mark.parametrize("field", ["model", "base"])
def test_a_reward_model_grades_its_tenant_alone(field: str, belongings: Belongings, stranger: httpx.Client) -> None:
    for uri in (belongings.adapter_uri, belongings.adapter_uri.removeprefix("file://")):
        grader = {"type": "reward_model", "name": "taste", "model": "file:///r"} | {field: uri}
        run = {"model": "org/tiny", "rollouts": ROLLOUTS | {"grader": grader}}
        answer = stranger.post("/api/v1/runs/rl", json=run)
        assert answer.status_code == 422 and "nothing of yours" in answer.json()["error"]["message"], answer.text


def test_what_was_kept_apart_is_there(service: Service, belongings: Belongings, owner: httpx.Client) -> None:
    """The same URI in its owner's hands is accepted: what is refused above is refused for whose it is."""
    answer = owner.post("/api/v1/runs/sft", json=sft(dataset={"uri": belongings.file_uri}))
    assert answer.status_code == 201, answer.text


def test_a_saved_state_is_loaded_by_its_tenant_alone(
    belongings: Belongings, service: Service, owner: httpx.Client, stranger: httpx.Client, tiny_model: Path
) -> None:
    """A state that nobody has, one of another tenant's session, and a checkpoint by its URI."""
    key = RunKeys(belongings.session).checkpoint(Fence(epoch=1), 1)
    service.store.put_bytes(f"{key}/{MANIFEST}", Manifest(files=()).encoded())
    state = {"kind": "load_state", "state": f"{belongings.session}:step-1"}
    told = {}
    for name, asking in (("owner", owner), ("stranger", stranger)):
        session = asking.post("/api/v1/sessions", json={"model": tiny_model.as_uri()}).json()["run_id"]
        told[name] = asking.put(f"/api/v1/sessions/{session}/commands/1", json=state)
        nobodys = asking.put(f"/api/v1/sessions/{session}/commands/2", json=state | {"state": "session-0:step-1"})
        assert nobodys.status_code == 404 and "no run session-0" in nobodys.text
        smuggled = state | {"checkpoint": {"uri": f"{service.store.uri}/{key}", "sha256": "0" * 64}}
        refused = asking.put(f"/api/v1/sessions/{session}/commands/3", json=smuggled)
        assert refused.status_code == 422 and "checkpoint" in refused.text
        asking.post(f"/api/v1/runs/{session}/cancel")
    assert told["owner"].status_code == 202, told["owner"].text
    assert told["stranger"].status_code == 404
    assert told["stranger"].text.replace(belongings.session, "session-0") == nobodys.text
