"""Where our own requests go for users: not into our network, by redirect, by DNS rebinding or by any spelling.

Downloads have tests of their own (tests/activities/sources/test_download.py). Here: webhooks, judges and samplers.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from temporalio.testing import ActivityEnvironment

from activities.grading.open_grader import ScoreModel
from activities.sampling.samplers import Samplers
from longshore.automation import WebhookChoice
from longshore.grading import SampledItem, ScoreModelGrader
from service.automation.webhooks import NotDelivered
from shared.automation import DeliverRequest, Notice
from shared.errors import InvalidInput, SamplerUnavailable
from shared.serving import ServedSampler
from shared.settings import GradingSettings, Settings, WebhookSettings
from tests.served import ANY_PORT, Quiet, served
from tests.service.apis.native.webhook_stack import webhooks_of

PUBLIC = "93.184.216.34"
SPELLINGS = ("127.0.0.1", "localhost", "2130706433", "0x7f.1", "127.1", "[::1]", "[::ffff:127.0.0.1]", "0")


class Server(ThreadingHTTPServer):
    """Answers 404 to everything, or redirects it, and counts."""

    def __init__(self) -> None:
        super().__init__(ANY_PORT, _Asked)
        self.num_asked = 0
        self.location: str | None = None


class _Asked(Quiet):
    server: Server

    def do_GET(self) -> None:
        self.server.num_asked += 1
        location = self.server.location
        self.answer(307, headers={"Location": location}) if location else self.answer(404)

    do_POST = do_GET


@pytest.fixture
def server() -> Iterator[Server]:
    with served(Server()) as server:
        yield server


class Internet:
    """What `example.test` resolves to, in turn; whoever connects to its public address reaches the server.

    Attributes:
        reached: the addresses that were connected to.
    """

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = [PUBLIC, "127.0.0.1", "127.0.0.1", "127.0.0.1"]
        self.reached: list[str] = []
        self._port = server.server_port
        self._resolve, self._create = socket.getaddrinfo, socket.create_connection
        monkeypatch.setattr("socket.getaddrinfo", self._getaddrinfo)
        monkeypatch.setattr("socket.create_connection", self._connect)

    def _getaddrinfo(self, host, *arguments, **named):
        name = host.decode() if isinstance(host, bytes) else host
        return self._resolve(self.answers.pop(0) if name == "example.test" else host, *arguments, **named)

    def _connect(self, address, *arguments, **named):
        self.reached.append(address[0])
        if address[0] == PUBLIC:
            return self._create(("127.0.0.1", self._port), *arguments, **named)
        return self._create(address, *arguments, **named)


@pytest.fixture
def internet(server: Server, monkeypatch: pytest.MonkeyPatch) -> Internet:
    return Internet(server, monkeypatch)


Ask = Callable[[str], None]


@pytest.fixture(params=["webhook", "judge", "sampler"])
def ask(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ask]:
    """Sends a user's request of each kind to a URL; raises what the user is told."""
    settings = Settings(root=tmp_path)
    yield {"webhook": _webhook(settings), "judge": _judge, "sampler": _sampler(settings)}[request.param]


def _webhook(settings: Settings) -> Ask:
    # Made where private addresses are allowed: what is asked here is whether a delivery reaches them.
    lenient = settings.model_copy(update={"webhooks": WebhookSettings(allow_private_addresses=True)})
    webhooks, makes = webhooks_of(settings), webhooks_of(lenient)

    def ask(url: str) -> None:
        made = asyncio.run(makes.create("acme", None, WebhookChoice(url=f"{url}/hook")))
        notice = Notice(notice_id=f"evt-{'1' * 23}", tenant="acme", type="ping", created_at=1.0, data={})
        asyncio.run(ActivityEnvironment().run(webhooks.deliver, DeliverRequest(webhook_id=made.id, notice=notice)))

    return ask


def _judge(url: str) -> None:
    message = {"role": "user", "content": "{{ sample.output_text }}"}
    grader = ScoreModelGrader.model_validate(
        {"name": "judge", "model": "m", "input": [message], "range": [0, 100], "base_url": f"{url}/v1"}
    )
    scorer = ScoreModel(grader, GradingSettings(score_model_timeout_s=5), False)
    outcomes = scorer.grade_all([SampledItem(sample={"output_text": "a"})])
    if outcomes[0].grade is None:
        raise InvalidInput(str(outcomes[0].error))


def _sampler(settings: Settings) -> Ask:
    def ask(url: str) -> None:
        with Samplers(settings).open(ServedSampler(url=url)):
            pass

    return ask


@pytest.mark.parametrize("host", SPELLINGS)
def test_our_own_network_is_closed_however_it_is_spelt(host: str, ask: Ask, server: Server) -> None:
    with pytest.raises(InvalidInput, match="private network"):
        ask(f"http://{host}:{server.server_port}")
    assert server.num_asked == 0


def test_a_name_that_resolves_otherwise_a_moment_later_changes_nothing(
    ask: Ask, server: Server, internet: Internet
) -> None:
    """DNS rebinding: the address that was checked is the one that is connected to."""
    with pytest.raises((InvalidInput, SamplerUnavailable, NotDelivered), match="404"):
        ask("http://example.test")
    assert set(internet.reached) == {PUBLIC} and server.num_asked == 1


def test_a_redirect_is_not_followed(ask: Ask, server: Server, internet: Internet) -> None:
    """Into our network least of all."""
    with socket.create_server(("127.0.0.1", 0)) as inside:
        inside.settimeout(0.2)
        server.location = f"http://127.0.0.1:{inside.getsockname()[1]}/latest/meta-data"
        with pytest.raises((InvalidInput, SamplerUnavailable, NotDelivered), match="307"):
            ask("http://example.test")
        with pytest.raises(TimeoutError):
            inside.accept()
    assert set(internet.reached) == {PUBLIC} and server.num_asked == 1
