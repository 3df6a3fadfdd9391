"""Requests that are made to break something: names that climb, bombs, depth; and what a body may cost at most."""

import gzip
import json
import socket
import statistics
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest

from longshore.training import _translated
from service.app import MAX_BODY_BYTES, create_app
from service.decoding import SMALL_BYTES
from shared.settings import Settings
from tests.security.belongings import STRING_CHECK, SWEEP, Belongings, Operation
from tests.security.worst_bodies import Tried, endpoints, tried, worst
from tests.service.conftest import Service, sft

CLIMBS = (
    "../../../etc/passwd",
    "..",
    ".",
    "....//x",
    "..\\..\\x",
    "/etc/passwd",
    "a/../../b",
    "~root",
    "C:\\x",
    "a\0b",
)
REFUSED = (307, 400, 403, 404, 405, 409, 422)


@pytest.fixture
def untouched(service: Service) -> Any:
    """Beside the store and the database nothing was written, whatever a test sent."""
    root = service.settings.root_path

    def found() -> set[Path]:
        # One level each: what lies deeper beside the root is of other tests, and their servers write there.
        return {path for path in (*root.parent.iterdir(), *root.iterdir()) if "pytest" not in path.name}

    before = found()
    yield
    assert found() == before


def test_a_name_does_not_climb_out_of_a_path(
    walk: tuple[Operation, ...], belongings: Belongings, owner: httpx.Client, untouched: None
) -> None:
    """Each parameter of each path in turn, plain and escaped once and twice: never anything, and never a bug."""
    tried = 0
    for operation in walk:
        if operation.method not in ("GET", "DELETE"):
            continue
        ids = belongings.ids_for(operation)
        for name in operation.parameters:
            for climb in ("../../../etc/passwd", "..\\..\\x", "x/../../service/longshore.db"):
                for escaped in (quote(climb, safe=""), quote(quote(climb, safe=""), safe="")):
                    answer = operation.ask(owner, ids | {name: escaped})
                    assert answer.status_code in REFUSED, (operation, name, escaped, answer.text)
                    assert "root:" not in answer.text
                    tried += 1
    assert tried > 100


@pytest.mark.parametrize("path", ["/static/..%2f..%2fapp.py", "/static/%2e%2e/pages.py", "/static/....//pages.py"])
def test_static_files_are_those_of_the_page(path: str, service: Service) -> None:
    """Sent as it is: a client would tidy it up."""
    assert " 404 " in raw(service, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")


def test_names_of_files_are_plain_or_made_plain(owner: httpx.Client, service: Service, untouched: None) -> None:
    for climb in CLIMBS:
        answer = owner.post("/api/v1/files", params={"name": climb}, content=b"{}\n")
        assert (answer.status_code, answer.json()["error"]["place"]) == (422, "name"), climb
        made = owner.post("/v1/files", files={"file": (climb, b"{}\n")}, data={"purpose": "fine-tune"})
        assert made.status_code == 200, (climb, made.text)
        assert not set(made.json()["filename"]) & set("/\\\0 ") and not made.json()["filename"].startswith(".")
        announced = {"filename": climb, "purpose": "fine-tune", "bytes": 1, "mime_type": "text/plain"}
        upload = owner.post("/v1/uploads", json=announced)
        assert upload.status_code == 200 and "/" not in upload.json()["filename"]
        for field, value in (("name", climb), ("layout", climb)):
            assert owner.post("/api/v1/runs/sft", json=sft(**{field: value})).status_code == 422, climb
        fields = {"tenant": climb}
        with service.http() as operator:
            assert operator.post("/tenants", json=fields).status_code == 422
    keys = [item.key for item in service.store.list("")]
    assert all(".." not in key.split("/") and "\\" not in key for key in keys)


def raw(service: Service, text: str | bytes) -> str:
    """What the service answers to these very bytes, as far as it lets them be sent."""
    parts = urlsplit(service.url)
    answer = b""
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection, suppress(ConnectionError):
        connection.sendall(text.encode() if isinstance(text, str) else text)
        while piece := connection.recv(1 << 16):
            answer += piece
    return answer.decode(errors="replace")


def test_no_header_comes_of_what_a_client_sends(owner: httpx.Client, service: Service, belongings: Belongings) -> None:
    """Line ends in ids, names and headers end up in no header of an answer."""
    for given in ("a\r\nx-evil: 1", "a\nx-evil: 1", "a b", "é", "a" * 65, ""):
        wire = given.encode("utf-8")
        head = (
            b"GET /api/v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nx-request-id: "
            + wire
            + b"\r\n\r\n"
        )
        answer = raw(service, head)
        headers = answer.partition("\r\n\r\n")[0].lower()
        assert "x-evil" not in headers, given
    split = quote("a\r\nx-evil: 1", safe="")
    for path in (f"/api/v1/runs/{split}", f"/login?after={split}", f"/runs/{split}", f"/api/v1/runs/x/files/{split}"):
        for client in (owner, httpx.Client(base_url=service.url, trust_env=False)):
            answer = client.get(path)
            assert "x-evil" not in answer.headers and answer.status_code < 500, path
    made = owner.post("/v1/files", files={"file": ('a"\r\nx-evil: 1', b"{}\n")}, data={"purpose": "fine-tune"})
    if made.status_code == 200:
        assert "x-evil" not in owner.get(f"/v1/files/{made.json()['id']}/content").headers
    refused = owner.post("/api/v1/webhooks", json={"url": "https://example.com/\r\nx-evil: 1"})
    assert refused.status_code == 422


def test_the_page_signs_in_to_itself_alone(service: Service) -> None:
    """`after` leads to no other site, whatever it looks like."""
    others = ("https://evil.test/", "//evil.test/", "/\\evil.test", "javascript:alert(1)", "/%09/evil.test")
    for after in (*others, "/api/v1/runs"):
        form = {"key": "ls-test-key", "after": after}
        answer = httpx.post(f"{service.url}/login", data=form, trust_env=False)
        assert answer.status_code == 303 and answer.headers["location"] == "/", after


# Bodies.


def nested(depth: int) -> bytes:
    return b'{"sample":{"output_text":"a","x":' + b'{"x":' * depth + b"1" + b"}" * (depth + 2)


@pytest.mark.parametrize("depth", [90, 250, 900, 3000, 100_000])
def test_depth_is_an_answer_and_not_a_fall(depth: int, owner: httpx.Client, walk: tuple[Operation, ...]) -> None:
    """JSON within JSON, where any JSON may stand, and where none may."""
    grader = json.dumps(STRING_CHECK).encode()
    body = b'{"grader":' + grader + b',"sample":' + nested(depth) + b"}"
    asked: list[tuple[str, bytes]] = [
        ("/api/v1/graders/run", body),
        ("/api/v1/runs/sft", nested(depth)),
        ("/v1/fine_tuning/jobs", b'{"model":"m","training_file":"f","metadata":' + nested(depth) + b"}"),
        ("/api/v1/validate", b"[" * depth),
    ]
    if "/v1/preview/training-jobs" in {operation.path for operation in walk}:
        asked.append(("/v1/preview/training-jobs", b'{"trajectory_groups":[' + nested(depth) + b"]}"))
    for path, data in asked:
        answer = owner.post(path, content=data, headers={"content-type": "application/json"})
        expected = (200,) if path == "/api/v1/graders/run" and depth < 100 else (400, 404, 413, 422)
        assert answer.status_code in expected, (path, answer.text[:300])


@pytest.mark.parametrize(
    "data",
    [
        b"NaN",
        b'{"model": NaN}',
        b'{"steps": 1e999, "model": "m"}',
        b'{"model": "\\ud800", "dataset": {"uri": "u"}, "steps": 1, "batch_size": 1}',
        b'{"name": "a\\u0000b", "model": "m"}',
        b'{"model": "m", "model": "n"}',
        b'{"steps": ' + b"9" * 5000 + b"}",
        b"\xff\xfe{}",
        b'"' + b"a" * 1000 + b'"',
    ],
)
def test_odd_json_is_refused_with_an_answer(data: bytes, owner: httpx.Client) -> None:
    for path in ("/api/v1/runs/sft", "/api/v1/keys", "/v1/fine_tuning/jobs", "/v1/chat/completions"):
        if path == "/api/v1/keys" and b"{" in data[:1]:
            continue
        answer = owner.post(path, content=data, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 422), (path, answer.text[:300])
        json.loads(answer.content.decode("utf-8"))


def test_a_large_body_is_refused_before_it_has_come(owner: httpx.Client, service: Service) -> None:
    """By the length that it tells, and without one by counting; packed bodies are not unpacked."""

    def endless() -> Any:
        for _ in range(4 * MAX_BODY_BYTES // 65536):
            yield b" " * 65536

    told = owner.post("/v1/chat/completions", content=b"x" * (MAX_BODY_BYTES + 1))
    untold = owner.post("/v1/chat/completions", content=endless())
    assert (told.status_code, untold.status_code) == (413, 413)
    bomb = gzip.compress(b'{"model": "' + b"a" * (64 << 20) + b'"}')
    assert len(bomb) < MAX_BODY_BYTES
    for path in ("/api/v1/runs/sft", "/v1/chat/completions", "/v1/fine_tuning/jobs"):
        packed = owner.post(
            path, content=bomb, headers={"content-encoding": "gzip", "content-type": "application/json"}
        )
        assert packed.status_code in (400, 415, 422), (path, packed.text[:200])


def test_a_large_body_for_another_tenants_run_is_not_read(
    owner: httpx.Client, stranger: httpx.Client, belongings: Belongings
) -> None:
    """What is wrong with it is told to the run's owner alone: to others there is no such run."""
    paths = (f"/api/v1/runs/{belongings.ids['run_id']}/steps", f"/api/v1/sessions/{belongings.session}/commands/1")
    for method, path in zip(("POST", "PUT"), paths, strict=True):
        answers = [
            each.request(method, path, content=b"[" * SMALL_BYTES * 2, headers={"content-type": "application/json"})
            for each in (owner, stranger)
        ]
        assert [answer.status_code for answer in answers] == [422, 404], path


def test_a_header_or_a_form_without_end_is_cut(owner: httpx.Client, service: Service, belongings: Belongings) -> None:
    head = f"GET /api/v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {belongings.key}\r\n"
    assert " 200 " not in raw(service, f"{head}x-long: {'a' * (1 << 20)}\r\n\r\n")
    assert " 200 " in raw(service, f"{head}Connection: close\r\nx-short: a\r\n\r\n")
    form = b'--XX\r\nContent-Disposition: form-data; name="' + b"a" * (8 << 20)
    headers = {"content-type": "multipart/form-data; boundary=XX"}
    assert owner.post("/v1/files", content=form, headers=headers).status_code == 400
    many = b"".join(b"--XX\r\nx-%d: y\r\n" % n for n in range(1)) + b"x: y\r\n" * 100_000
    assert owner.post("/v1/files", content=many, headers=headers).status_code == 400
    assert owner.post("/v1/files", content=b"x", headers={"content-type": "multipart/form-data"}).status_code == 400
    boundary = {"content-type": f"multipart/form-data; boundary={'b' * 5000}"}
    assert owner.post("/v1/files", content=b"x", headers=boundary).status_code == 400


# All bounds are multiples of what other work costs here and now, so that no machine's speed has a part in them.
MOST_TIMES = 40
SFT = "POST", "/api/v1/runs/sft"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return create_app(Settings(root=tmp_path_factory.mktemp("described"), temporal_codec=True))


def plain_s(app: Any, num_bytes: int) -> float:
    """CPU seconds of a body that any API has: an object of so many bytes, whose fields are not known."""
    body = json.dumps(dict.fromkeys(map(str, range(min(900, num_bytes // 10))), "a" * (num_bytes // 9000))).encode()
    return statistics.median(tried(endpoints(app)[SFT], body).cpu_s for _ in range(5))


def test_the_worst_small_body_of_every_operation_costs_little(app: Any) -> None:
    found: dict[tuple[str, str], list[Tried]] = {}
    for operation, endpoint in endpoints(app).items():
        found[operation] = worst(app.openapi(), operation, endpoint, SMALL_BYTES, 100)
    assert len(found) > 30
    bound = MOST_TIMES * plain_s(app, SMALL_BYTES)
    # Once more: whoever shares this machine may have made one of them slow.
    over = {
        operation: each.body[:200]
        for operation, bodies in found.items()
        for each in bodies
        if min(tried(endpoints(app)[operation], each.body).cpu_s for _ in range(3)) > bound
    }
    assert not over, over


def lora_of_patterns(pattern: str, number: int) -> dict[str, Any]:
    ranks = {f"{i:03d}{pattern}": 2 for i in range(number)}
    return {"model": "org/tiny", "dataset": {"uri": "https://example.org/a"}, "steps": 1, "batch_size": 1} | {
        "trainable": {"kind": "lora", "rank_pattern": ranks}
    }


LARGE: dict[str, tuple[tuple[str, str], Any]] = {
    "patterns": (SFT, lora_of_patterns(r"\w+" * 100, 250)),
    "patterns that are too many": (SFT, lora_of_patterns(r"\w+" * 320, 80)),
    "parts of a chat": (
        ("POST", "/v1/chat/completions"),
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 30_000}]},
    ),
    "labels": (
        ("PUT", "/api/v1/sessions/{run_id}/commands/{number}"),
        {
            "kind": "forward_backward",
            "data": [{"tokens": [5] * 50, "labels": [[7] * 128] * 49, "label_weights": [[1] * 128] * 49}] * 15,
        },
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_a_child_has_validated_costs_the_web_process_little(app: Any, name: str) -> None:
    operation, body = LARGE[name]
    sent = json.dumps(body).encode()
    assert len(sent) > SMALL_BYTES
    assert min(tried(endpoints(app)[operation], sent).cpu_s for _ in range(3)) < MOST_TIMES * plain_s(app, SMALL_BYTES)


def refused_sweep(num_choices: int) -> dict[str, Any]:
    """A sweep of four times as many combinations, of which the last ones are refused: nothing is left of it."""
    rates = [round(0.001 * (1 + i), 6) for i in range(num_choices - 1)]
    parameters = {"learning_rate": {"choices": [*rates, -1]}, "seed": {"choices": [1, 2, 3, 4]}}
    adapter = {"kind": "lora", "rank_pattern": {"q_proj": 2}}  # by which validations are counted
    return SWEEP | {"name": "costly", "run": SWEEP["run"] | {"trainable": adapter}, "parameters": parameters}


def test_a_sweep_costs_the_web_process_as_much_whatever_it_multiplies(owner: httpx.Client, service: Service) -> None:
    """Its trials are validated one by one, elsewhere. (The service of this test is a thread of this process.)"""

    def num_validations(num_choices: int) -> int:
        before = _translated.cache_info()
        answer = owner.post("/api/v1/sweeps", json=refused_sweep(num_choices))
        assert answer.status_code == 422 and answer.json()["error"]["place"] == "parameters.learning_rate", answer.text
        after = _translated.cache_info()
        return after.hits + after.misses - before.hits - before.misses

    assert num_validations(64) == num_validations(1) > 0


def test_a_sweep_is_not_checked_on_for_a_client_that_has_left(service: Service, belongings: Belongings) -> None:
    """Many such requests take none of the tenant's places for longer than they last: else it would be told to wait."""
    body = json.dumps(refused_sweep(64))
    head = f"POST /api/v1/sweeps HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {belongings.key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    parts = urlsplit(service.url)
    for _ in range(40):  # more than the tenant's places and its line together
        with socket.create_connection((parts.hostname, parts.port)) as connection:
            connection.sendall((head + body).encode())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # gone at once
    with httpx.Client(base_url=service.url, headers={"authorization": f"Bearer {belongings.key}"}) as asking:
        answer = asking.post("/api/v1/sweeps", json=refused_sweep(3), timeout=60)
    assert answer.status_code == 422, answer.text
