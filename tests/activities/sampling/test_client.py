"""The client against servers that misbehave. Against those that behave: test_sampler_conformance.py of the worker."""

import gzip
import json
import socket
import threading
import tracemalloc
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import activities.sampling.client
from activities.sampling.client import MAX_EVENT_BYTES, Sampler
from shared.chat.completions import CompletionRequest, Sampling
from shared.errors import InvalidInput, SamplerUnavailable
from shared.settings import ConfinedSettings
from tests.conftest import free_port

CHOICE = {
    "index": 0,
    "text": "ab",
    "finish_reason": "stop",
    "stop_reason": 7,
    "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-0.5, -1.5], "text_offset": [0, 1], "top_logprobs": None},
    "token_ids": [4, 7],
}
GOOD = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [CHOICE],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}


class Scripted:
    """A server that gives the answers of a list, one a request, and remembers what it was asked."""

    def __init__(self, answers):
        self.answers, self.asked = list(answers), []
        script = self

        class Exchange(BaseHTTPRequestHandler):
            def do_POST(self):
                length = int(self.headers.get("Content-Length", 0))
                script.asked.append((self.path, json.loads(self.rfile.read(length) or b"null")))
                status, body = script.answers.pop(0)
                if status == 0:  # hang up without an answer
                    self.close_connection = True
                    return
                text = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(200 if status == 206 else status)
                # 206: hang up before the answer has all the bytes that were announced.
                self.send_header("Content-Length", str(len(text) + (status == 206)))
                self.close_connection = status == 206
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Exchange)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def client(self, attempts=3):
        return Sampler(f"http://127.0.0.1:{self.server.server_address[1]}/", "key", attempts=attempts)


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(activities.sampling.client, "_FIRST_PAUSE_S", 0.01)
    servers = []

    def make(*answers):
        servers.append(Scripted(answers))
        return servers[-1]

    yield make
    for server in servers:
        server.server.shutdown()
        server.server.server_close()


def sample(client, n=1):
    return client.sample("m", (1, 2), Sampling(max_tokens=3, stop=("x",)), n=n, seed=9)


def with_choice(**changes):
    return {**GOOD, "choices": [{**CHOICE, **changes}]}


def test_what_passes_is_tried_again(scripted):
    server = scripted((503, b"loading"), (0, b""), (200, GOOD))
    (found,) = sample(server.client())
    assert found.token_ids == (4, 7)
    assert found.logprobs == (-0.5, -1.5)
    assert (found.was_cut_off, found.stop_reason) == (False, 7)
    assert server.asked[0] == server.asked[1] == server.asked[2]
    path, body = server.asked[0]
    assert path == "/v1/completions"
    assert body["prompt"] == [1, 2]
    assert (body["seed"], body["n"], body["stop"], body["return_token_ids"]) == (9, 1, ["x"], True)


def events(*chunks):
    return b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks)


def chunk(index=0, text="a", usage=None, **changes):
    head = {"id": "cmpl-1", "created": 1, "model": "m", "usage": usage}
    return {**head, "choices": [] if usage else [{"index": index, "text": text, **changes}]}


END = chunk(usage=GOOD["usage"])


def stream(client, tell=lambda texts: None):
    return client.complete(CompletionRequest(model="m", prompt=[1, 2], n=2, seed=9, max_tokens=2000), tell)


def test_a_stream_that_breaks_off_is_asked_for_again(scripted):
    """A server that dies hangs up in the middle of the stream, before its last chunk."""
    parts = [chunk(0, "a"), chunk(1, "x"), chunk(0, "b", finish_reason="stop"), chunk(1, "", finish_reason="length")]
    server = scripted((206, events(*parts[:2])), (200, events(*parts, END)))
    told = []
    answer = stream(server.client(), told.append)
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [("ab", "stop"), ("x", "length")]
    assert told[-4:] == [("a", ""), ("a", "x"), ("ab", "x"), ("ab", "x")]
    assert server.asked[-1][1]["stream"] is True


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (events(chunk(0, finish_reason="stop"), END), SamplerUnavailable, "ended before the answer"),
        (events(chunk(0, finish_reason="stop"), chunk(1, finish_reason="stop")), SamplerUnavailable, "before the ans"),
        (events({"error": {"message": "out of memory", "code": 500}}), SamplerUnavailable, "out of memory"),
        (events(chunk(2)), InvalidInput, "a choice 2"),
        (events(chunk(-1)), InvalidInput, "a choice -1"),
        (events({"choices": "none"}), InvalidInput, "makes no sense"),
        (b"data: " + b"x" * (MAX_EVENT_BYTES + 1), InvalidInput, "an event of more than"),
        (events(chunk(0, "a" * 1000)) * 9000, InvalidInput, "answers with more than"),
    ],
)
def test_a_stream_that_makes_no_sense_is_refused(scripted, body, error, words):
    with pytest.raises(error, match=words):
        stream(scripted((200, body)).client())


def test_it_gives_up_after_its_attempts(scripted):
    server = scripted(*[(500, {"error": {"message": "boom", "type": "server_error"}})] * 5)
    with pytest.raises(SamplerUnavailable, match=r"3 attempts.*boom"):
        sample(server.client())
    assert len(server.asked) == 3


def test_nobody_listens():
    client = Sampler(f"http://127.0.0.1:{free_port()}", attempts=1)
    with pytest.raises(SamplerUnavailable):
        client.models()


def test_a_refusal_is_not_tried_again(scripted):
    server = scripted((400, {"error": {"message": "top_p is 7", "type": "invalid_request_error", "code": None}}))
    with pytest.raises(InvalidInput, match="400: top_p is 7"):
        sample(server.client())
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>",
        {**GOOD, "choices": []},
        {**GOOD, "choices": [CHOICE, CHOICE]},
        with_choice(token_ids=None),
        with_choice(logprobs=None),
        with_choice(token_ids=[4]),
        with_choice(logprobs={"tokens": ["a", "b"], "token_logprobs": [-0.5, None]}),
    ],
)
def test_answers_that_cannot_be_trained_on_are_refused(scripted, answer):
    with pytest.raises(InvalidInput):
        sample(scripted((200, answer)).client())


def told(token, logprob):
    return {str(token): {"logprob": logprob, "rank": 3, "decoded_token": "x"}, "99": {"logprob": -0.1}}


def test_scores_are_of_the_prompts_own_tokens(scripted):
    server = scripted((200, with_choice(prompt_logprobs=[None, told(5, -0.25), told(6, -2.5)])))
    assert server.client().score("m", (4, 5, 6)) == (-0.25, -2.5)
    ((_, body),) = server.asked
    assert (body["prompt"], body["prompt_logprobs"], body["max_tokens"]) == ([4, 5, 6], 0, 1)


@pytest.mark.parametrize(
    "prompt_logprobs",
    [
        None,
        [],
        [None, told(5, -0.25)],
        [None, told(5, -0.25), None],
        [None, told(5, -0.25), told(7, -2.5)],
        [None, told(5, -0.25), told(6, float("-inf"))],
    ],
)
def test_scores_that_are_not_one_a_token_are_refused(scripted, prompt_logprobs):
    server = scripted((200, with_choice(prompt_logprobs=prompt_logprobs)))
    with pytest.raises(InvalidInput, match="prompt_logprobs"):
        server.client().score("m", (4, 5, 6))


def test_a_sample_that_was_given_up_is_no_sample(scripted):
    with pytest.raises(SamplerUnavailable, match="abort"):
        sample(scripted((200, with_choice(finish_reason="abort"))).client())


def test_an_adapter_that_an_earlier_attempt_loaded_is_loaded(scripted):
    refusal = (400, {"error": {"message": "The lora adapter 'a' has already been loaded.", "type": "x"}})
    models = {"object": "list", "data": [{"id": "a", "object": "model", "root": "/a", "parent": "m"}]}
    scripted((0, b""), refusal, (200, models)).client().load_adapter("a", "/a")
    with pytest.raises(InvalidInput, match="already been loaded"):
        scripted(refusal, (200, models)).client().load_adapter("a", "/another")


def test_closing_hangs_up_on_a_request_of_another_thread():
    """A server that draws for somebody sees that nobody waits any more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Sampler(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def ask():
            with suppress(RuntimeError, SamplerUnavailable):
                client.models()

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(10)
            assert connection.recv(65536).startswith(b"GET /v1/models")
            client.close()
            assert connection.recv(1) == b""
    asking.join(30)
    assert not asking.is_alive()


def test_connections_that_were_closed_are_forgotten(scripted):
    """A server that hangs up after each answer, as this one does, is asked for as long as a host lives."""
    client = scripted(*[(200, GOOD)] * 20).client()
    for _ in range(20):
        sample(client)
    assert len(client._sockets) <= 2


class Flood:
    """A server that answers everything with zeros, packed or without end, and counts how often it is asked."""

    def __init__(self, encoding: str | None) -> None:
        self.num_asked = 0
        self.num_sent = 0
        flood = self

        class Exchange(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                flood.num_asked += 1
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(200)
                if encoding:
                    self.send_header("Content-Encoding", encoding)
                self.end_headers()
                piece = gzip.compress(bytes(64 << 20)) if encoding else b"[" * (1 << 20)
                with suppress(OSError):
                    for _ in range(96):
                        self.wfile.write(piece)
                        flood.num_sent += len(piece)

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Exchange)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.mark.parametrize(
    ("encoding", "rule"), [("gzip", "as 'gzip', which it was not asked for"), (None, "more than 1,0[0-9]{2},[0-9]{3}")]
)
def test_an_answer_that_is_packed_or_too_long_is_final_before_it_is_read(encoding: str | None, rule: str) -> None:
    """6 MB of gzip were unpacked to 4.5 GiB, sixty times."""
    flood = Flood(encoding)
    tracemalloc.start()
    try:
        with Sampler(flood.url) as sampler, pytest.raises(InvalidInput, match=rule):
            sampler.sample("m", (1, 2), Sampling(max_tokens=8), n=1, seed=0)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20  # both ends are of this process
    finally:
        tracemalloc.stop()
        flood.server.shutdown()
        flood.server.server_close()
    assert flood.num_asked == 1


def test_a_large_answer_of_a_strangers_server_is_read_in_a_child(scripted) -> None:
    """What it takes there is the server's error. What a whole request may be answered with is read as any other."""
    logprobs = {"tokens": ["a"] * 300_000, "token_logprobs": [-0.5] * 300_000}
    long = {**CHOICE, "token_ids": [4] * 300_000, "logprobs": logprobs, "finish_reason": "length"}
    hostile = b'{"more": [' + b"{}," * (8 << 20) + b"{}]}"
    server = scripted((200, hostile), *[(200, {**GOOD, "choices": [long]})] * 2)
    url = f"http://127.0.0.1:{server.server.server_address[1]}"
    with Sampler(url, confinement=ConfinedSettings(memory_bytes=512 << 20)) as sampler:
        with pytest.raises(InvalidInput, match=r"memory|makes no sense"):
            sampler.sample("m", (1, 2), Sampling(max_tokens=100_000), n=1, seed=0)
        [found] = sampler.sample("m", (1, 2), Sampling(max_tokens=300_000), n=1, seed=0)
        assert len(found.token_ids) == 300_000
        with pytest.raises(InvalidInput, match="more tokens than were asked for"):
            sampler.sample("m", (1, 2), Sampling(max_tokens=100_000), n=1, seed=0)
