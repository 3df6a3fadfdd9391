"""Questions go to hosts over a socket of this user, or by mutual TLS: what is told, refused, lost and taken back."""

import asyncio
import json
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import RootModel, SecretStr

from activities.sampling.questions import OpenQuestion
from longshore.fields import Artifact
from service.host_http.answers import answering
from service.host_http.connections import HostClients, Trust, serving
from service.inference.questions import SamplerHostClient, SamplerLost, StreamedAnswer
from shared.chat.completions import Choice, CompletionRequest, CompletionResponse, Usage
from shared.errors import InvalidInput, WorkerLost
from shared.serving import CompleteRequest, ServedSampler
from shared.settings import Settings
from shared.storage.host_states import HostAddress

NOWHERE = Artifact(uri="file:///nowhere", sha256="0" * 64)
SILENCE_S = 30.0


def question(prompt: str = "How many crates?", tenant: str = "default") -> CompleteRequest:
    asked = CompletionRequest(model="m", prompt=prompt)
    return CompleteRequest(
        tenant=tenant, model=NOWHERE, adapter=None, base="m", place=ServedSampler(url="http://s"), asked=asked
    )


@dataclass
class Asked:
    """Answers by a function."""

    answer: Callable[[CompleteRequest, OpenQuestion], RootModel[str]]

    def close(self) -> None:
        pass


@contextmanager
def host(
    root: Path,
    answer: Callable[[CompleteRequest, OpenQuestion], RootModel[str]],
    address: str | None = None,
    seal_key: str = "k" * 32,
) -> Iterator[tuple[Settings, HostAddress]]:
    settings = Settings.model_validate({"root": root, "seal_key": seal_key, "host_address": address})
    with answering(Asked(answer)) as routes, serving(settings, "host-one", routes) as at:
        yield settings, at


def elsewhere(at: HostAddress) -> HostAddress:
    """As another machine sees it."""
    return at.model_copy(update={"socket": "/nowhere/host.sock"})


async def asked(
    settings: Settings, at: HostAddress, request: CompleteRequest | None = None, draft: StreamedAnswer | None = None
) -> bytes:
    clients = HostClients(settings, SILENCE_S)
    try:
        return await SamplerHostClient(clients).ask(at, request or question(), draft)
    finally:
        await clients.close()


def prompt_of(request: CompleteRequest) -> str:
    assert isinstance(request.asked, CompletionRequest)
    return str(request.asked.prompt)


def echo(request: CompleteRequest, asking: OpenQuestion) -> RootModel[str]:
    return RootModel(prompt_of(request))


async def test_a_machine_of_its_own_is_asked_at_a_socket_of_this_user_alone(tmp_path: Path) -> None:
    """However long its path is."""
    with host(tmp_path / ("x" * 120), echo) as (settings, at):
        assert at.address is None
        for path in (Path(at.socket), Path(at.socket).parent):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
        assert await asked(settings, at, question("twelve\ncrates")) == b'"twelve\\ncrates"'
        with pytest.raises(SamplerLost, match="LONGSHORE_HOST_ADDRESS"):
            await asked(settings, elsewhere(at))


async def test_another_machine_asks_by_mutual_tls(tmp_path: Path) -> None:
    with host(tmp_path, echo, "127.0.0.1") as (settings, at):
        assert await asked(settings, elsewhere(at), question("twelve")) == b'"twelve"'
        stranger = settings.model_copy(update={"seal_key": None, "root": tmp_path / "other"})
        with pytest.raises(SamplerLost, match="certificate verify failed"):
            await asked(stranger, elsewhere(at))
        await asyncio.to_thread(refused_without_a_certificate, settings, stranger, str(at.address))


OLD, NEW = "o" * 32, "n" * 32


@pytest.mark.parametrize(
    ("hosts", "askers"),
    [(OLD, f"{OLD} {NEW}"), (f"{OLD} {NEW}", f"{NEW} {OLD}"), (f"{NEW} {OLD}", f"{OLD} {NEW}"), (NEW, f"{NEW} {OLD}")],
)
async def test_machines_trust_each_other_in_each_step_of_a_rotation(tmp_path: Path, hosts: str, askers: str) -> None:
    with host(tmp_path, echo, "127.0.0.1", hosts) as (settings, at):
        asker = settings.model_copy(update={"seal_key": SecretStr(askers)})
        assert await asked(asker, elsewhere(at), question("twelve")) == b'"twelve"'


def refused_without_a_certificate(settings: Settings, stranger: Settings, address: str) -> None:
    """Whoever has no certificate, or one of another installation, gets no answer even if it trusts the host."""
    own = Trust.of(settings).client_context()
    for has_certificate in (False, True):
        context = Trust.of(stranger).client_context() if has_certificate else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        assert answers(context, address) is False, has_certificate
    assert answers(own, address)


def answers(context: ssl.SSLContext, address: str) -> bool:
    name, _, port = address.rpartition(":")
    raw = socket.create_connection((name, int(port)), 10)
    with suppress(ssl.SSLError, ConnectionError), raw, context.wrap_socket(raw) as own:
        own.sendall(b"POST /answers HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n{}")
        return own.recv(100).startswith(b"HTTP/1.1 400")
    return False


def texts_of(events: bytes) -> list[str]:
    """The text of each choice."""
    found = ["", ""]
    for line in events.decode().split("\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found[choice["index"]] += choice["text"]
    return found


def answer_of(*texts: str) -> CompletionResponse:
    choices = [Choice(index=i, text=text, finish_reason="stop") for i, text in enumerate(texts)]
    usage = Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2)
    return CompletionResponse(id="cmpl-1", created=1, model="m", choices=choices, usage=usage)


async def test_events_are_passed_on_as_text_grows_and_another_host_continues_them(tmp_path: Path) -> None:
    """Shorter texts, with which another sampler begins, are passed over; what was sent is not sent again."""
    heard, told = threading.Semaphore(0), [("a",), ("a b", "c\u2028"), ("a",), ("a b", "c\u2028 d")]

    def lost(request: CompleteRequest, asking: OpenQuestion) -> CompletionResponse:
        assert asking.tell is not None
        for number, texts in enumerate(told):
            asking.tell(texts)
            assert number == 2 or heard.acquire(timeout=60)
        raise WorkerLost("it died")

    def continues(request: CompleteRequest, asking: OpenQuestion) -> CompletionResponse:
        assert asking.tell is not None
        asking.tell(("a",))
        return answer_of("a b e", "c\u2028 d")

    question_asked = question().asked
    draft, sent = StreamedAnswer(question_asked), b""
    request = question().model_copy(update={"stream": draft.start})
    with host(tmp_path / "one", lost) as (settings, at):
        answering = asyncio.create_task(asked(settings, at, request, draft))
        for texts in (told[0], told[1], told[3]):
            await asyncio.wait_for(draft.changed.wait(), 300)
            sent += draft.take()
            assert texts_of(sent)[: len(texts)] == list(texts)
            heard.release()
        with pytest.raises(SamplerLost, match="it died"):
            await answering
    rest = request.model_copy(update={"stream": draft.start})
    with host(tmp_path / "two", continues) as (settings, at):
        assert await asked(settings, at, rest, draft) == b""
    sent += draft.take()
    assert texts_of(sent) == ["a b e", "c\u2028 d"] and sent.endswith(b"data: [DONE]\n\n")
    with host(tmp_path / "three", lambda request, asking: answer_of("another", "c")) as (settings, at):
        asking = asyncio.create_task(asked(settings, at, rest, StreamedAnswer(question_asked)))
        with pytest.raises(InvalidInput, match="another one's answer differs"):
            await asking


async def test_what_goes_wrong_has_a_kind(tmp_path: Path) -> None:
    errors: dict[str, Exception] = {
        "refused": InvalidInput("too long", "prompt"),
        "lost": WorkerLost("the worker process ended"),
        "failed": ZeroDivisionError("a secret"),
    }

    def fail(request: CompleteRequest, asking: OpenQuestion) -> RootModel[str]:
        raise errors[prompt_of(request)]

    with host(tmp_path, fail) as (settings, at):
        with pytest.raises(InvalidInput, match="too long") as refused:
            await asked(settings, at, question("refused"))
        assert refused.value.place == "prompt"
        with pytest.raises(SamplerLost, match="the worker process ended"):
            await asked(settings, at, question("lost"))
        with pytest.raises(RuntimeError, match=r"^the host that was asked failed$"):
            await asked(settings, at, question("failed"))


async def test_a_host_that_is_gone_or_silent_is_lost(tmp_path: Path) -> None:
    leave = threading.Event()

    def wait(request: CompleteRequest, asking: OpenQuestion) -> RootModel[str]:
        leave.wait(60)
        return RootModel("")

    with host(tmp_path, wait) as (settings, at):
        clients = HostClients(settings, 0.2)
        with pytest.raises(SamplerLost, match="ReadTimeout"):  # the sign of life comes later
            await SamplerHostClient(clients).ask(at, question())
        await clients.close()
        leave.set()
    with pytest.raises(SamplerLost):
        await asked(settings, at)


async def test_whoever_hangs_up_takes_the_question_back(tmp_path: Path) -> None:
    connected, closed, seen = threading.Event(), threading.Event(), threading.Event()

    def endless(request: CompleteRequest, asking: OpenQuestion) -> RootModel[str]:
        with asking.connected(closed.set):
            connected.set()
            assert closed.wait(60)
        seen.set()
        raise WorkerLost("nobody hears this")

    with host(tmp_path, endless) as (settings, at):
        task = asyncio.create_task(asked(settings, at))
        assert await asyncio.to_thread(connected.wait, 60)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(seen.wait, 60)


async def test_of_large_answers_a_tenant_has_one_at_a_time(tmp_path: Path) -> None:
    """20 MB pass as they are; while one of a tenant's waits to be taken, another tenant's comes."""
    whole, whole_json = "1" * (20 << 20), b'"%b"' % (b"1" * (20 << 20))
    with host(tmp_path, lambda request, asking: RootModel(whole)) as (settings, at):
        clients = HostClients(settings, SILENCE_S)
        hosts = SamplerHostClient(clients)
        async with hosts._large.place("default"):
            mine = asyncio.create_task(hosts.ask(at, question()))
            assert await hosts.ask(at, question(tenant="other")) == whole_json
            assert not mine.done()
        assert await mine == whole_json
        await clients.close()
