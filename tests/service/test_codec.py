"""The codec of payloads: what Temporal is given, what hosts take from it, by which keys, and over which TLS."""

import asyncio
import contextlib
import datetime
import ssl
import stat
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from pydantic import SecretStr, ValidationError
from pydantic_settings import SettingsError
from temporalio.api.common.v1 import Payload
from temporalio.api.failure.v1 import Failure
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.converter import ActivitySerializationContext, DataConverter, WorkflowSerializationContext
from temporalio.exceptions import ApplicationError

from service.cli.stack import _seal_key
from service.sealing import UNSEALED, SealKeys, key_of, seal_keys, sealed_data_converter, unseal
from service.temporal import connect_once, connect_temporal
from shared.errors import InvalidInput, WrongSealKey
from shared.settings import Settings
from shared.storage.paths import SEAL_KEYS

OLD, NEW, OTHER = "old-" * 8, "new-" * 8, "other-" * 8
RUN = WorkflowSerializationContext(namespace="default", workflow_id="sft-1")
CANARY = "canary in a prompt"


def activity_of(run: str, name: str) -> ActivitySerializationContext:
    return ActivitySerializationContext("default", "1", name, "control", run, "SFTWorkflow", False)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(root=tmp_path)


def keys_of(settings: Settings, *keys: str) -> SealKeys:
    """A process with these keys, which has been let in."""
    keys_here = SealKeys.of(settings.model_copy(update={"seal_key": SecretStr(" ".join(keys))}))
    keys_here.admit()
    return keys_here


@pytest.fixture
def keys(settings: Settings) -> SealKeys:
    return keys_of(settings, OLD)


async def read(converter: DataConverter, payload: Payload) -> object:
    return (await converter.decode([payload]))[0]


async def refused(converter: DataConverter, payload: Payload) -> None:
    with pytest.raises(ApplicationError) as caught:
        await read(converter, payload)
    assert (caught.value.type, caught.value.non_retryable) == (UNSEALED, True)


async def test_a_payload_tells_nothing_and_is_read_where_it_belongs(keys: SealKeys) -> None:
    converter = sealed_data_converter(keys).with_context(RUN)
    [first], [second] = [await converter.encode([{"prompt": CANARY}]) for _ in range(2)]
    assert await read(converter, first) == {"prompt": CANARY}
    assert not any(word in first.SerializeToString() for word in (b"canary", b"prompt", b"json"))
    assert first.data != second.data, "equal payloads look different"
    assert key_of(first) == keys.current.id and OLD.encode() not in first.SerializeToString()


@pytest.mark.parametrize(
    "elsewhere",
    [
        WorkflowSerializationContext("default", "sft-2"),
        WorkflowSerializationContext("another", "sft-1"),
        activity_of("sft-1", "publish"),
        activity_of("sft-1", ""),
        None,
    ],
)
async def test_elsewhere_it_is_refused(keys: SealKeys, elsewhere: WorkflowSerializationContext | None) -> None:
    converter = sealed_data_converter(keys)
    [sealed] = await converter.with_context(RUN).encode([CANARY])
    await refused(converter.with_context(elsewhere) if elsewhere else converter, sealed)


async def test_the_result_of_an_activity_is_read_as_that_activitys_alone(keys: SealKeys) -> None:
    converter = sealed_data_converter(keys)
    [sealed] = await converter.with_context(activity_of("sft-1", "pack")).encode([1])
    assert await read(converter.with_context(activity_of("sft-1", "pack")), sealed) == 1
    for elsewhere in (activity_of("sft-1", "publish"), activity_of("sft-2", "pack"), RUN):
        await refused(converter.with_context(elsewhere), sealed)


async def test_what_was_changed_or_never_sealed_is_refused(keys: SealKeys, tmp_path: Path) -> None:
    converter = sealed_data_converter(keys).with_context(RUN)
    [sealed] = await converter.encode([CANARY])
    flipped = bytes([sealed.data[-1] ^ 1])
    strangers = sealed_data_converter(keys_of(Settings(root=tmp_path / "other"), OTHER)).with_context(RUN)
    [plain], [of_a_stranger] = await pydantic_data_converter.encode([CANARY]), await strangers.encode([CANARY])
    bad = [
        plain,
        of_a_stranger,
        Payload(metadata=sealed.metadata, data=sealed.data[:-1] + flipped),
        Payload(metadata=sealed.metadata, data=sealed.data[:11]),
        Payload(metadata=sealed.metadata),
        Payload(metadata={**sealed.metadata, "encoding": b"json/plain"}, data=sealed.data),
        Payload(metadata={**of_a_stranger.metadata, "encryption-key-id": keys.current.id.encode()}, data=sealed.data),
        Payload(metadata={"encoding": b"binary/encrypted", "encryption-key-id": b"\xff\xff"}, data=sealed.data),
        Payload(),
    ]
    for payload in bad[:6] + bad[7:]:
        await refused(converter, payload)
    assert await read(converter, bad[6]) == CANARY, "the words beside the seal are no part of what is read"


async def test_errors_are_read_where_they_belong_and_tell_nothing(keys: SealKeys) -> None:
    converter = sealed_data_converter(keys).with_context(activity_of("sft-1", "pack"))
    failure = Failure()
    try:
        raise ValueError(CANARY)
    except ValueError as error:
        await converter.encode_failure(
            ApplicationError(f"row 3: {CANARY}", {"row": CANARY}, type="InvalidInput"), failure
        )
        inner = Failure()
        await converter.encode_failure(error, inner)
    for each in (failure, inner):
        assert b"canary" not in each.SerializeToString() and b"test_codec" not in each.SerializeToString()
    assert failure.application_failure_info.type == "InvalidInput", "by which the server knows what not to retry"
    assert CANARY in str(await converter.decode_failure(failure))
    assert CANARY in str(await converter.decode_failure(inner))


# Keys.


def test_a_root_makes_one_key_for_all_its_processes_and_closes_it(tmp_path: Path) -> None:
    settings = Settings(root=tmp_path)
    [key] = seal_keys(settings)
    assert len(key.secret) == 64
    assert seal_keys(settings) == (key,) != seal_keys(Settings(root=tmp_path / "another"))
    assert [path.name for path in tmp_path.glob("*seal*")] == ["seal.key"]
    assert stat.S_IMODE((tmp_path / "seal.key").stat().st_mode) == 0o600
    (tmp_path / "seal.key").write_text(f"{NEW}\n{OLD}\n")
    assert [each.secret for each in seal_keys(settings)] == [NEW.encode(), OLD.encode()]
    given = Settings(root=tmp_path, seal_key=SecretStr("0123456789abcdef" * 2))
    assert [each.secret for each in seal_keys(given)] == [b"0123456789abcdef" * 2]


@pytest.mark.parametrize("given", ["short", f"{OLD} short", "  "])
def test_a_short_key_is_refused(given: str) -> None:
    with pytest.raises(ValidationError, match="32 characters or more"):
        Settings.model_validate({"seal_key": given})


def test_secrets_are_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("SEAL_KEY", f"{NEW}\n{OLD}"), ("SAMPLING__API_KEY", "of the sampler"), ("MAX_RANKS", "3")):
        (tmp_path / name).write_text(f"{text}\n")
        monkeypatch.setenv(f"LONGSHORE_{name}_FILE", str(tmp_path / name))
    monkeypatch.setenv("LONGSHORE_MAX_RANKS", "2")
    settings = Settings()
    assert [each.secret for each in seal_keys(settings)] == [NEW.encode(), OLD.encode()]
    assert settings.sampling.api_key == SecretStr("of the sampler")
    assert settings.max_ranks == 2, "what a variable says itself comes first"
    (tmp_path / "SEAL_KEY").unlink()
    with pytest.raises(SettingsError, match=r"LONGSHORE_SEAL_KEY_FILE: .*SEAL_KEY cannot be read"):
        Settings()


async def test_keys_are_rotated_in_three_steps(settings: Settings) -> None:
    """The next one is read everywhere before it seals anywhere; the last one until nothing of it is left."""
    steps = [keys_of(settings, *keys) for keys in ((OLD,), (OLD, NEW), (NEW, OLD))]
    converters = [sealed_data_converter(each).with_context(RUN) for each in steps]
    for writing, *reading in ((0, 0, 1, 2), (1, 0, 1, 2), (2, 1, 2)):
        [sealed] = await converters[writing].encode([CANARY])
        for each in reading:
            assert await read(converters[each], sealed) == CANARY
    [of_the_last] = await converters[0].encode([CANARY])
    [of_the_next] = await converters[2].encode([CANARY])
    left: list[str] = []
    done = sealed_data_converter(keys_of(settings, NEW), lambda: left.append("done")).with_context(RUN)
    converters[0] = sealed_data_converter(steps[0], lambda: left.append("first")).with_context(RUN)
    assert await read(done, of_the_next) == CANARY
    # Neither is refused: the installation's own key is missing, and whoever has it reads on.
    for converter, sealed in ((done, of_the_last), (converters[0], of_the_next)):
        with pytest.raises(WrongSealKey, match=f"key {key_of(sealed)} of this installation, which this process lacks"):
            await read(converter, sealed)
    assert left == ["first"], "whoever lacks an older key still does what is new"
    assert unseal(of_the_last, steps[2].keys) is not None and unseal(of_the_last, steps[2].keys[:1]) is None


def test_a_wrong_key_is_told_and_leaves_no_trace(settings: Settings, keys: SealKeys) -> None:
    for wrong in ((OTHER,), (NEW, OTHER)):
        with pytest.raises(WrongSealKey, match=f"seals with the key {keys.current.id}, and not with "):
            keys_of(settings, *wrong)
    assert keys.listed() == [keys.current.id]
    keys_of(settings, NEW, OLD)
    with pytest.raises(WrongSealKey):  # the last one alone, after the switch: it would read nothing new
        keys_of(settings, OLD)
    keys_of(settings, OLD, NEW)  # but back is a way, too
    assert len(keys.listed()) == 2


def test_doctor_tells_a_wrong_key(settings: Settings, tmp_path: Path) -> None:
    store = (settings.root_path / "store").as_uri()
    elsewhere = Settings(root=tmp_path / "elsewhere", store_uri=store)
    assert (_seal_key(elsewhere).verdict, _seal_key(elsewhere).text[:9]) == ("ok", "none here")
    assert not elsewhere.root_path.exists(), "doctor makes no key"
    given = elsewhere.model_copy(update={"seal_key": SecretStr(f"{OTHER} {NEW}")})
    assert _seal_key(given).verdict == "ok" and not (settings.root_path / "store" / SEAL_KEYS).exists()
    keys = keys_of(settings, OLD)
    check = _seal_key(given)
    assert check.verdict == "fail" and f"seals with the key {keys.current.id}, and not with" in check.text
    assert check.advice is not None and "nothing is lost" in check.advice
    known = _seal_key(elsewhere.model_copy(update={"seal_key": SecretStr(f"{OLD} {NEW}")}))
    assert (known.verdict, known.text[:11]) == ("ok", "seals with ")


async def test_processes_that_start_at_once_agree_on_one_key(settings: Settings) -> None:
    async def start(key: str) -> bool:
        try:
            await asyncio.to_thread(keys_of, settings, key)
        except WrongSealKey:
            return False
        return True

    began = await asyncio.gather(*(start(f"{number:032}") for number in range(8)))
    assert began.count(True) == 1
    assert len(keys_of(settings, f"{began.index(True):032}").listed()) == 1
    assert (settings.root_path / "store" / SEAL_KEYS).exists()


async def test_no_failure_is_longer_than_temporal_takes(keys: SealKeys) -> None:
    """Whatever raised it, with its causes: Temporal would ask for the activity again, until its time is over."""
    converter = sealed_data_converter(keys).with_context(activity_of("sft-1", "tokenize"))
    for quoting in (RuntimeError, InvalidInput, ApplicationError):
        failure = Failure()
        try:
            try:
                raise ValueError("at first " + "x" * 3_000_000)
            except ValueError as error:
                raise quoting(f"row 3: {error}") from error
        except Exception as error:
            await converter.encode_failure(error, failure)
        assert failure.ByteSize() < 50_000
        read = await converter.decode_failure(failure)
        assert "row 3: at first xxx" in str(read) and "at first xxx" in str(read.__cause__)


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.certificate = folder / "ca.pem"
        self._openssl(*("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=authority"))
        (folder / "out.pem").rename(self.certificate)
        (folder / "key.pem").rename(folder / "ca.key")

    def issue(self, name: str) -> tuple[Path, Path]:
        """A certificate for this name, and its key."""
        signed = ("-CA", str(self.certificate), "-CAkey", str(self._folder / "ca.key"))
        named = (
            "-subj",
            f"/CN={name}",
            "-addext",
            f"subjectAltName=DNS:{name}",
            "-addext",
            "basicConstraints=CA:FALSE",
        )
        self._openssl("req", "-x509", *signed, "-newkey", "rsa:2048", "-nodes", "-days", "1", *named)
        return (
            (self._folder / "out.pem").rename(self._folder / f"{name}.pem"),
            (self._folder / "key.pem").rename(self._folder / f"{name}.key"),
        )

    def expire(self, path: Path) -> None:
        """Issue a certificate again, which has expired an hour ago."""
        old = x509.load_pem_x509_certificate(path.read_bytes())
        key = load_pem_private_key((self._folder / "ca.key").read_bytes(), None)
        hour, now = datetime.timedelta(hours=1), datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            old.issuer, old.subject, old.public_key(), old.serial_number, now - 24 * hour, now - hour
        )
        for each in old.extensions:
            builder = builder.add_extension(each.value, each.critical)
        assert isinstance(key, RSAPrivateKey)
        path.write_bytes(builder.sign(key, SHA256()).public_bytes(Encoding.PEM))

    def _openssl(self, *arguments: str) -> None:
        written = ("-keyout", str(self._folder / "key.pem"), "-out", str(self._folder / "out.pem"))
        subprocess.run(["openssl", *arguments, *written], check=True, capture_output=True)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
async def tls_address(
    authority: Authority, temporal_address: str, request: pytest.FixtureRequest
) -> AsyncIterator[str]:
    """The Temporal server behind mutual TLS: whoever shows no certificate of the authority is hung up on.

    Its own certificate has expired where the parameter says so.
    """
    context, (certificate, key) = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), authority.issue("temporal.test")
    if getattr(request, "param", None) == "the server's":
        authority.expire(certificate)
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(authority.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = temporal_address.partition(":")
        behind, before = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_pipe(reader, before), _pipe(behind, writer))

    server = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


def tls_settings(root: Path, address: str, authority: Authority, certificate: Path, key: Path) -> Settings:
    return Settings(
        root=root,
        temporal_address=address,
        temporal_tls_ca=authority.certificate,
        temporal_tls_name="temporal.test",
        temporal_tls_cert=certificate,
        temporal_tls_key=key,
    )


async def test_hosts_and_service_speak_mutual_tls(tmp_path: Path, authority: Authority, tls_address: str) -> None:
    certificate, key = authority.issue("host")
    settings = tls_settings(tmp_path, tls_address, authority, certificate, key)
    client = await connect_temporal(settings, patience_s=5)
    assert await client.service_client.check_health()
    stranger = Authority(tmp_path / "another").issue("host")
    for changes in (
        {"temporal_tls_ca": None, "temporal_tls_name": None, "temporal_tls_cert": None, "temporal_tls_key": None},
        {"temporal_tls_cert": None, "temporal_tls_key": None},
        {"temporal_tls_cert": stranger[0], "temporal_tls_key": stranger[1]},
        {"temporal_tls_ca": tmp_path / "another" / "ca.pem"},
        {"temporal_tls_name": None},
    ):
        with pytest.raises(RuntimeError):
            await asyncio.wait_for(connect_once(settings.model_copy(update=changes)), 300)


@pytest.mark.parametrize("tls_address", whose := ["the host's", "the server's"], indirect=True, ids=whose)
async def test_an_expired_certificate_is_told_as_that(
    tmp_path: Path, authority: Authority, tls_address: str, request: pytest.FixtureRequest
) -> None:
    certificate, key = authority.issue("host")
    if "the host's" in request.node.name:
        authority.expire(certificate)
    settings = tls_settings(tmp_path, tls_address, authority, certificate, key)
    with pytest.raises(SystemExit) as left:
        await connect_temporal(settings, patience_s=1)
    assert "expired" in str(left.value).lower()


async def test_an_api_key_goes_over_tls_alone(tmp_path: Path, temporal_address: str) -> None:
    """The server here speaks in the clear: it is told no key."""
    settings = Settings(root=tmp_path, temporal_address=temporal_address)
    assert await connect_once(settings)
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(connect_once(settings.model_copy(update={"temporal_api_key": SecretStr("key")})), 300)


async def test_files_of_tls_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nowhere\.pem: cannot be read"):
        await connect_once(Settings(root=tmp_path, temporal_tls_ca=tmp_path / "nowhere.pem"))
    with pytest.raises(InvalidInput, match="go together"):
        await connect_once(Settings(root=tmp_path, temporal_tls_cert=tmp_path / "nowhere.pem"))
