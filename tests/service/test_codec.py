"""The codec of payloads: what Temporal is given, what hosts take from it, and which keys do both."""

import asyncio
import stat
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError
from pydantic_settings import SettingsError
from temporalio.api.common.v1 import Payload
from temporalio.api.failure.v1 import Failure
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.converter import ActivitySerializationContext, DataConverter, WorkflowSerializationContext
from temporalio.exceptions import ApplicationError

from service.cli.doctor import _seal_key
from service.errors import WrongSealKey
from service.sealing import UNSEALED, SealKeys, key_of, seal_keys, sealed_data_converter, unseal
from shared.errors import InvalidInput
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
