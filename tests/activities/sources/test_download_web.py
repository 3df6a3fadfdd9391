"""Downloads from the web: transfers that break off, redirects, what may be asked, and where a URI may lead."""

import os
import ssl
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from temporalio.activity import ActivityCancellationDetails
from temporalio.common import RetryPolicy
from temporalio.exceptions import CancelledError
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext, locked
from activities.sources.download import Download, DownloadRequest
from longshore.dataset_runs import DatasetSource
from shared.errors import StoreUnavailable
from tests.activities.sources.downloads import ROWS, download, files_of, refusal, scratch_of, with_limits
from tests.activities.web_server import Page, WebServer, serve_pages


def test_a_page(settings, web) -> None:
    web.pages["/some/rows.jsonl.zst"] = Page(zstandard.compress(ROWS))
    downloaded = download(settings, f"{web.uri}/some/rows.jsonl.zst?signature=secret")
    assert files_of(settings, downloaded) == {"rows.jsonl": ROWS}
    assert scratch_of(settings) == []


@pytest.mark.parametrize("length", [True, False])
def test_a_page_with_an_odd_name(settings, web, length) -> None:
    web.pages["/"] = Page(ROWS, etag=None, length=length)
    assert files_of(settings, download(settings, web.uri)) == {"dataset": ROWS}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a%00b.jsonl", "a_b.jsonl"), ("%C3%A9" * 80, "\xe9" * 48), ("x" * 300 + ".txt", "x" * 44 + ".txt")],
)
def test_a_url_of_any_name_becomes_a_file(settings, web, name, expected) -> None:
    web.pages[f"/{name}"] = Page(ROWS)
    assert files_of(settings, download(settings, f"{web.uri}/{name}")) == {expected: ROWS}


def test_a_broken_transfer_goes_on_where_it_stopped(settings, web) -> None:
    data = os.urandom(3_000_000)
    web.pages["/big"] = Page(data, breaks=[1_000_000, 500_000])
    downloaded = download(settings, f"{web.uri}/big")
    assert files_of(settings, downloaded) == {"big": data}
    assert web.asked == [("/big", None), ("/big", "bytes=1000000-"), ("/big", "bytes=1500000-")]


def test_a_transfer_goes_on_in_the_next_attempt(settings, web) -> None:
    data = os.urandom(3_000_000)
    web.pages["/big"] = Page(data, breaks=[2_000_000, 0, 0, 0])
    with pytest.raises(StoreUnavailable, match=r"broke off at 2,000,000 of 3,000,000 bytes"):
        download(settings, f"{web.uri}/big")
    web.asked.clear()
    assert files_of(settings, download(settings, f"{web.uri}/big")) == {"big": data}
    assert web.asked == [("/big", "bytes=2000000-")]
    assert scratch_of(settings) == []


@pytest.mark.parametrize(
    ("policy", "attempt", "keeps_parts", "is_left"),
    [
        (RetryPolicy(maximum_attempts=5), 4, True, True),
        (RetryPolicy(maximum_attempts=5), 5, True, False),
        (RetryPolicy(), 100, True, True),
        (RetryPolicy(), 1, False, False),
    ],
)
def test_the_parts_of_a_download_go_with_its_last_attempt(
    settings, web, policy: RetryPolicy, attempt: int, keeps_parts: bool, is_left: bool
) -> None:
    web.pages["/big"] = Page(os.urandom(300_000), breaks=[200_000, 0, 0, 0])
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, attempt=attempt, retry_policy=policy)
    request = DownloadRequest(
        run_id="sft-1", tenant="default", split="train", source=DatasetSource(uri=f"{web.uri}/big")
    )
    work = Download(HostContext(settings), keeps_parts=False) if not keeps_parts else Download(HostContext(settings))
    with pytest.raises(StoreUnavailable):
        environment.run(work.download, request)
    assert bool(scratch_of(settings)) == is_left


def test_parts_that_nobody_came_back_for_go_with_a_later_download_and_those_of_a_long_one_stay(settings, web) -> None:
    web.pages["/big"] = Page(os.urandom(300_000), breaks=[200_000, 0, 0, 0] * 2)
    for run_id in ("sft-1", "sft-2"):
        with pytest.raises(StoreUnavailable):
            download(settings, f"{web.uri}/big", run_id)
    folders = sorted((settings.root_path / "scratch" / "downloads").iterdir())
    assert len(folders) == 2
    for folder in folders:
        os.utime(folder, (time.time() - 86_400,) * 2)
    web.pages["/rows.jsonl"] = Page(ROWS)
    with locked(folders[0]):
        download(settings, f"{web.uri}/rows.jsonl", "sft-3")
    assert list((settings.root_path / "scratch" / "downloads").iterdir()) == folders[:1]


def test_parts_that_were_damaged_since_are_fetched_again(settings, web) -> None:
    data = os.urandom(3_000_000)
    web.pages["/big"] = Page(data, breaks=[2_000_000, 0, 0, 0])
    with pytest.raises(StoreUnavailable):
        download(settings, f"{web.uri}/big")
    [part] = [path for path in scratch_of(settings) if path.name == "data"]
    with part.open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"damaged")
    assert files_of(settings, download(settings, f"{web.uri}/big")) == {"big": data}


def test_a_changed_page_is_begun_again(settings, web) -> None:
    page = web.pages["/big"] = Page(b"a" * 3_000_000, breaks=[2_000_000, 0, 0, 0])
    with pytest.raises(StoreUnavailable):
        download(settings, f"{web.uri}/big")
    page.body, page.etag = b"b" * 2_500_000, '"v2"'
    assert files_of(settings, download(settings, f"{web.uri}/big")) == {"big": b"b" * 2_500_000}


@pytest.mark.parametrize(("ranges", "etag"), [(False, '"v1"'), (True, None), (True, 'W/"weak"')])
def test_a_server_that_cannot_resume_is_asked_for_all(settings, web, ranges, etag) -> None:
    data = os.urandom(300_000)
    web.pages["/big"] = Page(data, breaks=[100_000], ranges=ranges, etag=etag)
    assert files_of(settings, download(settings, f"{web.uri}/big")) == {"big": data}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 451])
def test_a_refusal_is_the_users_affair(settings, web, status) -> None:
    web.pages["/x"] = Page(b"no", status=status)
    message = refusal(settings, f"{web.uri}/x?token=secret")
    assert f"{web.uri}/x: the server answered {status}" in message
    assert "secret" not in message
    assert len(web.asked) == 1


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_servers_fault_is_worth_another_try(settings, web, status) -> None:
    web.pages["/x"] = Page(b"no", status=status)
    with pytest.raises(StoreUnavailable, match=f"the server answered {status}"):
        download(settings, f"{web.uri}/x")
    assert len(web.asked) == 3


def test_an_unreachable_server_is_worth_another_try(settings) -> None:
    with pytest.raises(StoreUnavailable, match=r"http://127\.0\.0\.1:9/x: the connection failed .*refused"):
        download(settings, "http://127.0.0.1:9/x")


def test_an_unknown_host_is_named(settings) -> None:
    with pytest.raises(StoreUnavailable, match="no address is known for this host"):
        download(settings, "http://no-such-host.invalid/x")


def test_too_many_bytes_are_refused(settings, web) -> None:
    web.pages["/said"] = Page(bytes(2_000))
    web.pages["/unsaid"] = Page(bytes(2_000), length=False)
    limited = with_limits(settings, max_bytes=1_000)
    for path in ("/said", "/unsaid"):
        assert "more than 1,000 bytes to transfer; the limit is download.max_bytes" in refusal(limited, web.uri + path)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "127.1", "[::1]", "[::ffff:7f00:1]"]
)
def test_our_own_network_is_closed(settings, web, host) -> None:
    web.pages["/x"] = Page(ROWS)
    closed = with_limits(settings, allow_private_addresses=False)
    message = refusal(closed, f"http://{host}:{web.uri.rpartition(':')[2]}/x")
    assert "private network" in message and "download.allow_private_addresses" in message
    assert web.asked == []


def test_a_redirect_is_followed(settings, web) -> None:
    web.pages["/a"] = Page(status=302, location="/b")
    web.pages["/b"] = Page(status=307, location=f"{web.uri}/c")
    web.pages["/c"] = Page(ROWS)
    assert files_of(settings, download(settings, f"{web.uri}/a")) == {"a": ROWS}


def test_each_hop_of_a_redirect_is_checked(settings, web, monkeypatch) -> None:
    """The first name is public by what the resolver says, and is served by the test; the second is private."""
    web.pages["/a"] = Page(status=302, location="http://169.254.169.254/latest/meta-data")
    monkeypatch.setattr("socket.create_connection", _connector(web, monkeypatch, ["93.184.216.34"]))
    closed = with_limits(settings, allow_private_addresses=False)
    assert "169.254.169.254: this host is on a private network" in refusal(closed, "http://example.test/a")
    assert web.asked == [("/a", None)]


def test_a_name_that_resolves_otherwise_later_changes_nothing(settings, web, monkeypatch) -> None:
    """DNS rebinding: a second look-up would give loopback. Only the address that was checked is connected to."""
    web.pages["/a"] = Page(ROWS)
    connect = _connector(web, monkeypatch, ["93.184.216.34", "127.0.0.1"])
    monkeypatch.setattr("socket.create_connection", connect)
    closed = with_limits(settings, allow_private_addresses=False)
    assert files_of(closed, download(closed, "http://example.test/a")) == {"a": ROWS}
    assert connect.addresses == ["93.184.216.34"]


def _connector(web: WebServer, monkeypatch, answers: list[str]):
    """Stands for the internet: example.test has these addresses in turn; every connection ends at the web server."""
    import socket

    resolve, create = socket.getaddrinfo, socket.create_connection
    port = int(web.uri.rpartition(":")[2])

    def getaddrinfo(host, *arguments, **named):
        return resolve(answers.pop(0) if host == "example.test" else host, *arguments, **named)

    def connect(address, timeout=None):
        connect.addresses.append(address[0])
        return create(("127.0.0.1", port), timeout)

    connect.addresses = []
    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    return connect


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("file:///etc/passwd", "only http://host/path"),
        ("gopher://x/", "only http://host/path"),
        ("/a", "more than 5 redirects"),
        (None, "names no place"),
        ("http://user:password@x/", "may not carry a user"),
        ("http://x:99999/", "not a URI"),
    ],
)
def test_other_redirects_are_refused(settings, web, location, reason) -> None:
    web.pages["/a"] = Page(status=302, location=location)
    assert reason in refusal(settings, f"{web.uri}/a")


def test_a_uri_with_a_password_is_refused_and_not_shown(settings) -> None:
    message = refusal(settings, "https://user:hunter2@example.test/x")
    assert "may not carry a user or password" in message and "hunter2" not in message


@pytest.fixture
def certificate(tmp_path) -> Path:
    """A certificate for `localhost` that nobody has signed, and its key, in one file."""
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "certificate.pem")]
    try:
        subprocess.run([*made, *named, *files], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    return tmp_path / "certificate.pem"


def test_https_checks_the_name_in_the_certificate(settings, certificate, tmp_path, monkeypatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, tmp_path / "key.pem")
    with serve_pages(context) as web:
        web.pages["/rows.jsonl"] = Page(ROWS)
        web.pages["/down"] = Page(status=302, location="http://127.0.0.1/rows.jsonl")
        uri = web.uri.replace("127.0.0.1", "localhost")
        assert "certificate is not trusted: self-signed" in refusal(settings, f"{uri}/rows.jsonl")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert "certificate is not trusted: IP address mismatch" in refusal(settings, f"{web.uri}/rows.jsonl")
        assert "from https to http is not followed" in refusal(settings, f"{uri}/down")
        assert files_of(settings, download(settings, f"{uri}/rows.jsonl")) == {"rows.jsonl": ROWS}


@pytest.mark.parametrize("page", [Page(ROWS * 3_000, trickles=True), Page(drips_headers=True)], ids=["body", "headers"])
def test_a_transfer_that_drips_is_given_up(settings, web, page) -> None:
    """Never silent for long, and never at its end: it would hold a thread for as long as its sender likes."""
    web.pages["/slow"] = page
    pace = with_limits(settings, timeout_s=0.3, slowest_bytes_per_s=1 << 20)
    with pytest.raises(StoreUnavailable) as given_up:
        download(pace, f"{web.uri}/slow")
    if page.trickles:
        assert "download.slowest_bytes_per_s" in str(given_up.value)


@pytest.mark.parametrize("leaving", [False, True])
def test_a_cancelled_download_stops_and_leaves_nothing_but_for_a_restart(settings, web, leaving) -> None:
    web.pages["/slow"] = Page(ROWS * 1_000, trickles=True)
    beats: list[object] = []
    environment = ActivityEnvironment()
    environment.on_heartbeat = lambda *details: beats.append(details)
    details = ActivityCancellationDetails(cancel_requested=not leaving, worker_shutdown=leaving)
    timer = threading.Timer(0.5, environment.cancel, [details])
    timer.start()
    request = DownloadRequest(
        run_id="sft-1", tenant="default", split="eval", source=DatasetSource(uri=f"{web.uri}/slow")
    )
    with pytest.raises(CancelledError):
        environment.run(Download(HostContext(settings)).download, request)
    timer.join()
    assert beats
    assert bool(scratch_of(settings)) == leaving
