"""Signed statements of what weights were made from: what holds, what is refused, which steps can be done again."""

import base64
import hashlib
import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from longshore.fields import Artifact, Fence
from longshore.training import Lora
from longshore.views import Envelope, FileEntry, Signature
from service.inference.retraining import stretches
from service.sealing import Signer, checked, read_key
from shared.errors import CorruptArtifact, InvalidInput
from shared.jobs.job import Job, JobPlan, PackedData, Schedule
from shared.provenance import Statement, enveloped, statement_of
from shared.settings import Settings
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.paths import RunKeys
from shared.storage.store import LocalStore

FILES = [
    FileEntry(path="adapter_model.safetensors", size=4, sha256="a" * 64),
    FileEntry(path="README.md", size=2, sha256="b" * 64),
]

PLACE = "tenants/acme/adapters/harbour/v000001"


def signer(root: Path, key: str = "one") -> Signer:
    return Signer(Settings(root=root, seal_key=SecretStr(key * 16)))


def statement() -> Statement:
    return statement_of(FILES, PLACE, "r1", {"kind": "sft"})


def with_payload(envelope: Envelope, **changes: object) -> Envelope:
    content = json.loads(base64.b64decode(envelope.payload)) | changes
    return envelope.model_copy(update={"payload": base64.b64encode(json.dumps(content).encode()).decode()})


def test_what_one_key_signs_it_alone_vouches_for(tmp_path: Path) -> None:
    mine, other = signer(tmp_path), signer(tmp_path, "two")
    envelope = mine.sign(statement())
    assert checked(Envelope.model_validate_json(envelope.model_dump_json()), [mine.public_key]) == statement()
    assert mine.sign(statement()) == envelope, "it is the same whenever it is made"
    assert checked(envelope, [other.public_key, mine.public_key]) == statement()
    with pytest.raises(CorruptArtifact, match="it is signed by"):
        checked(envelope, [other.public_key])
    with pytest.raises(CorruptArtifact, match="it is signed by nobody"):
        checked(enveloped(statement()), [mine.public_key])


def test_what_was_changed_behind_the_signature_is_refused(tmp_path: Path) -> None:
    mine, other = signer(tmp_path), signer(tmp_path, "two")
    envelope, key = mine.sign(statement()), mine.public_key
    by_other = other.sign(statement()).signatures[0].sig
    for changed in (
        with_payload(envelope, subject=[]),
        envelope.model_copy(update={"payload_type": "text/plain"}),
        envelope.model_copy(update={"payload": "no base64!"}),
        envelope.model_copy(update={"signatures": (Signature(keyid=key.keyid, sig=by_other),)}),
        envelope.model_copy(update={"signatures": (Signature(keyid=key.keyid, sig="?"),)}),
    ):
        with pytest.raises(CorruptArtifact, match="it is not what key"):
            checked(changed, [key])
    for pem in ("", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"):
        with pytest.raises(InvalidInput, match="no public key"):
            read_key(pem)


def test_a_statement_names_the_files_that_differ_from_it() -> None:
    said, changed = statement(), FILES[0].model_copy(update={"sha256": "c" * 64})
    assert said.differing(FILES) == []
    more = FileEntry(path="more.txt", size=1, sha256="d" * 64)
    assert said.differing([changed, more]) == ["README.md", "adapter_model.safetensors", "more.txt"]


def test_a_statement_is_of_one_version_of_one_tenant_and_names_neither() -> None:
    said = statement()
    assert said.is_of(PLACE) and "harbour" not in said.model_dump_json() and "acme" not in said.model_dump_json()
    for other in ("acme/adapters/harbour/v000002", "acme/adapters/port/v000001", "globex/adapters/harbour/v000001"):
        assert not said.is_of(f"tenants/{other}")
    assert not statement_of(FILES, "tenants/acme/models/harbour/v000001", "r1", {}).is_of(PLACE)


def test_a_statement_is_in_toto_s_and_tells_no_setting(tmp_path: Path) -> None:
    """The names are those of the framework's version 1 and of SLSA's version 1."""
    made = statement_of(FILES, PLACE, "r1", {"dataset": {"uri": "https://me:password@data.example/rows.jsonl"}})
    content = json.loads(base64.b64decode(signer(tmp_path).sign(made).payload))
    assert (content["_type"], content["predicateType"]) == (
        "https://in-toto.io/Statement/v1",
        "https://slsa.dev/provenance/v1",
    )
    assert content["subject"][0] == {"name": FILES[0].path, "digest": {"sha256": "a" * 64}}
    assert content["predicate"].keys() == {"buildDefinition", "runDetails"}
    assert content["predicate"]["runDetails"]["metadata"] == {"invocationId": "r1"}
    assert "password" not in json.dumps(content)
    assert made.predicate != statement_of(FILES, PLACE, "r1", {"dataset": {"uri": "https://other"}}).predicate


KEYS, FENCE = RunKeys("rl-1"), Fence(epoch=1)


def put(store: LocalStore, folder: Path, key: str, content: str) -> Artifact:
    path = folder / key
    path.mkdir(parents=True)
    (path / "file").write_text(content)
    seal(path)
    return upload_artifact(store, key, path)


def test_jobs_of_one_lease_have_stretches_between_their_own_checkpoints(tmp_path: Path) -> None:
    """As RL has them: a job a step of the run, each of which goes on from the last checkpoint of the one before."""
    store = LocalStore(tmp_path / "store")
    given = put(store, tmp_path, "packed/data", "data")
    places = dict.fromkeys(("log_path", "checkpoint_dir", "scratch_dir"), "/there")
    made: dict[int, Artifact] = {0: given}
    for number in (1, 2):
        first = 2 * (number - 1)
        plan = JobPlan(
            run_id="rl-1",
            job_id=f"{number:06d}",
            model=given,
            trainable=Lora(rank=4),
            data=PackedData(units=given, plan=given),
            num_steps=2,
            first_step=first,
            initial_checkpoint=made[first] if first else None,
            schedule=Schedule(learning_rate=1e-3),
        )
        job = Job(plan=plan, fence=FENCE, **places)
        store.put_bytes(KEYS.job(plan.job_id, FENCE), job.model_dump_json().encode())
        made |= {s: put(store, tmp_path, KEYS.checkpoint(FENCE, s), f"{s}") for s in (first + 1, first + 2)}

    def found() -> list[tuple[str, int, int, str]]:
        return [(s.job.plan.job_id, s.first_step, s.last_step, s.made.sha256) for s in stretches(store, "rl-1")]

    each = [("000001", 0, 1), ("000001", 1, 2), ("000002", 2, 3), ("000002", 3, 4)]
    assert found() == [(*place, made[place[2]].sha256) for place in each]
    signed = hashlib.sha256(store.get_bytes(KEYS.job("000002", FENCE))).hexdigest()
    assert len(stretches(store, "rl-1", signed)) == 4
    with pytest.raises(InvalidInput, match="no job of rl-1 in the store is the one that the statement names"):
        stretches(store, "rl-1", "0" * 64)
    store.delete(f"{KEYS.checkpoint(FENCE, 2)}/manifest.json")  # without it neither job can be done as it was
    assert [place[:3] for place in found()] == [("000001", 0, 1), ("000002", 3, 4)]
