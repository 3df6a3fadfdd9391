"""Publishing: versions, what a published adapter holds, and that doing it twice changes nothing."""

import hashlib
import json
from pathlib import Path

import pytest

from activities.host_context import HostContext
from activities.publishing.publish import REGISTERING, Claim, Publish, PublishRequest, claim_version, model_card
from activities.records import BeginRequest, Begun, RunRecords
from longshore.dataset_runs import DatasetSource, SFTRun
from longshore.events import Started
from longshore.fields import Artifact, Fence
from longshore.training import Full, Lora
from longshore.views import CheckpointRef, RunStatus
from service.inference.published_models import PublishedModels
from service.sealing import Signer, checked
from shared.errors import CorruptArtifact
from shared.jobs.job import Job, JobPlan, PackedData, Schedule
from shared.provenance import code_sha256
from shared.runs.start import result_sha256
from shared.settings import Settings
from shared.storage.artifacts import read_manifest, seal, sha256_file, stage, upload_artifact
from shared.storage.paths import RunKeys, published_version
from shared.storage.store import LocalStore, ObjectStore, open_store
from tests.workflows.stand_in import artifact
from tests.workflows.stand_in_worker import adapter_bytes

METRICS = {"loss": 0.25, "eval_loss": 0.5, "step_s": 1.234, "sampling_seconds": 2.0, "tokens_per_s": 99.0}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(root=tmp_path / "root")


@pytest.fixture
def store(settings: Settings) -> ObjectStore:
    return open_store(settings.store, settings.s3)


def request_for(store: ObjectStore, tmp_path: Path, run_id: str = "r1", name: str | None = "harbour", **changes):
    checkpoint = tmp_path / f"checkpoint-{run_id}"
    (checkpoint / "weights").mkdir(parents=True)
    (checkpoint / "weights" / "adapter_model.safetensors").write_bytes(adapter_bytes(7, 20))
    (checkpoint / "weights" / "adapter_config.json").write_text('{"r": 16, "base_model_name_or_path": null}')
    (checkpoint / "state.json").write_text("{}")
    seal(checkpoint)
    store.put_bytes("report.json", json.dumps({"num_rows": 12, "lengths": [1, 2]}).encode())
    return PublishRequest(
        run_id=run_id,
        run=SFTRun(
            name=name,
            model="file:///models/tiny",
            dataset=DatasetSource(uri="https://me:password@data.example/rows.jsonl?signature=secret"),
            epochs=1,
            batch_size=4,
            **changes,
        ),
        model=artifact(
            store, tmp_path / f"model-{run_id}", "model", config_json="{}", tokenizer_json="{}", weights_json="x"
        ),
        checkpoint=CheckpointRef(
            step=20, fence=Fence(epoch=1), artifact=upload_artifact(store, f"checkpoint-{run_id}", checkpoint)
        ),
        report_uri=f"{store.uri}/report.json",
        metrics=METRICS,
    )


def test_every_step_of_a_run_has_a_version_and_the_same_step_the_same_one(store) -> None:
    def claim(step: int, sha256: str = "a", run_id: str = "r1") -> int:
        return claim_version(
            store, "default", "adapters", "harbour", Claim(run_id=run_id, step=step, checkpoint_sha256=sha256)
        )

    assert [claim(1), claim(2), claim(1, run_id="r2"), claim(3)] == [1, 2, 3, 4]
    assert [claim(3), claim(1, run_id="r2"), claim(2)] == [4, 3, 2], "however often it is tried"
    assert claim(3, sha256="b") == 5, "a step that was never done, and whose number came again, is another adapter"


def test_a_published_adapter_has_the_checkpoints_bytes_and_a_card(settings, store, tmp_path: Path) -> None:
    published = Publish(HostContext(settings)).publish(request_for(store, tmp_path))
    assert (published.name, published.version) == ("harbour", 1)
    assert published.uri == f"{store.uri}/{published_version('default', 'adapters', 'harbour', 1)}"
    folder = stage(Artifact(uri=published.uri, sha256=published.sha256), tmp_path / "cache", settings.s3)
    assert (folder / "adapter_model.safetensors").read_bytes() == adapter_bytes(7, 20)
    config = json.loads((folder / "adapter_config.json").read_bytes())
    assert config == {"r": 16, "base_model_name_or_path": "/models/tiny"}
    card = (folder / "README.md").read_text()
    for words in ("file:///models/tiny", "| eval_loss | 0.5 |", "| LoRA rank | 16 |", "| num_rows | 12 |"):
        assert words in card
    for secret in ("password", "signature", "tokens_per_s", "step_s", "sampling_seconds"):
        assert secret not in card
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    ]
    assert not list((settings.root_path / "scratch").iterdir())


def test_a_version_has_a_signed_statement_of_its_job_beside_it(settings, store, tmp_path: Path) -> None:
    """Publishing again writes the same; the manifest does not name it, and it goes with the version."""
    request, signer = request_for(store, tmp_path), Signer(settings)
    keys, fence = RunKeys("r1"), request.checkpoint.fence
    units, plan = (Artifact(uri=f"file:///{name}", sha256=name[0] * 64) for name in ("data", "bins"))
    made = JobPlan(
        run_id="r1", job_id="000001", model=request.model, data=PackedData(units=units, plan=plan), num_steps=20,
        trainable=Lora(rank=16), schedule=Schedule(learning_rate=1e-3),
    )  # fmt: skip
    places = dict.fromkeys(("log_path", "checkpoint_dir", "scratch_dir"), "/there")
    job = Job(plan=made, fence=fence, **places).model_dump_json().encode()
    store.put_bytes(keys.job("000001", fence), job)
    started = Started(
        seq=1, time=1.0, run_id="r1", job_id="000001", fence=fence, first_step=0, num_steps=20,
        device="cpu", world_size=1, code=code_sha256(),
    )  # fmt: skip
    store.put_bytes(keys.log_part("000001", fence, 1), started.model_dump_json().encode() + b"\n")
    published = Publish(HostContext(settings), signer.sign).publish(request)
    models = PublishedModels(store)
    envelope = models.provenance("default", "harbour:v1")
    statement = checked(envelope, [signer.public_key])
    found = models.find("default", "harbour")
    key = published_version("default", "adapters", "harbour", 1)
    assert statement.differing(read_manifest(store, key, published.sha256).files) == [] and statement.is_of(key)
    causes = dict(statement.causes)
    assert causes["job"] == hashlib.sha256(job).hexdigest()
    assert causes["checkpoint"] == request.checkpoint.artifact.sha256
    assert causes["code"] == code_sha256()
    built = statement.predicate["buildDefinition"]
    assert {each["name"] for each in built["resolvedDependencies"]} == {"base model", "data units", "data plan"}
    assert causes["base model"] == request.model.sha256
    assert causes["device"] == "cpu"
    Publish(HostContext(settings), signer.sign).publish(request)
    assert models.provenance("default", "harbour:v1") == envelope
    models.delete("default", found)
    assert not list(store.list(f"{key}/"))


def test_what_somebody_laid_at_the_next_version_is_not_signed(settings, store, tmp_path: Path) -> None:
    request, signer = request_for(store, tmp_path), Signer(settings)
    key = published_version("default", "adapters", "harbour", 1)
    theirs = artifact(store, tmp_path / "theirs", key, adapter_model_safetensors="theirs")
    published = Publish(HostContext(settings), signer.sign).publish(request)
    statement = checked(PublishedModels(store).provenance("default", "harbour:v1"), [signer.public_key])
    assert published.sha256 != theirs.sha256
    assert statement.differing(read_manifest(store, key, published.sha256).files) == []
    own = request_for(store, tmp_path, run_id="r2", name="elsewhere")
    assert Publish(HostContext(settings)).publish(own).sha256 == published.sha256


def test_publishing_again_is_the_same_version_and_another_run_gets_the_next(settings, store, tmp_path: Path) -> None:
    first = request_for(store, tmp_path)
    publish = Publish(HostContext(settings)).publish
    published = publish(first)
    other = publish(request_for(store, tmp_path, run_id="r2"))
    again = publish(first.model_copy(update={"metrics": {"loss": 9.0}}))
    assert again == published
    assert other.version == 2
    assert other.sha256 == published.sha256, "the same training gives the same manifest, whatever its version"


def test_a_claim_that_was_never_filled_is_filled_by_its_run(settings, store, tmp_path: Path) -> None:
    assert claim_version(store, "default", "adapters", "harbour", Claim(run_id="r1")) == 1
    assert claim_version(store, "default", "adapters", "harbour", Claim(run_id="r2")) == 2
    assert claim_version(store, "default", "adapters", "harbour", Claim(run_id="r3")) == 3
    published = Publish(HostContext(settings)).publish(request_for(store, tmp_path, run_id="r2"))
    assert published.version == 2


def test_a_run_without_a_name_publishes_under_its_id(settings, store, tmp_path: Path) -> None:
    assert Publish(HostContext(settings)).publish(request_for(store, tmp_path, name=None)).name == "r1"


def test_a_fully_trained_model_takes_the_rest_of_its_folder_from_the_base(settings, store, tmp_path: Path) -> None:
    request = request_for(store, tmp_path, trainable=Full())
    checkpoint = tmp_path / "full"
    (checkpoint / "weights").mkdir(parents=True)
    (checkpoint / "weights" / "model.safetensors").write_bytes(b"trained")
    (checkpoint / "weights" / "config.json").write_text('{"trained": true}')
    seal(checkpoint)
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "model-1.safetensors"):
        (base / name).write_text("{}" if name == "config.json" else "base")
    (base / "model.safetensors.index.json").write_text("base")
    seal(base)
    ref = request.checkpoint.model_copy(update={"artifact": upload_artifact(store, "full", checkpoint)})
    published = Publish(HostContext(settings)).publish(
        request.model_copy(update={"checkpoint": ref, "model": upload_artifact(store, "base", base)})
    )
    folder = stage(Artifact(uri=published.uri, sha256=published.sha256), tmp_path / "cache", settings.s3)
    assert "/tenants/default/models/harbour/v000001" in published.uri
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "README.md",
        "manifest.json",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert (folder / "config.json").read_text() == '{"trained": true}'
    assert (folder / "model.safetensors").read_bytes() == b"trained"
    assert len(sha256_file(folder / "tokenizer.json")) == 64


def test_a_checkpoint_that_was_changed_is_refused(settings, store, tmp_path: Path) -> None:
    request = request_for(store, tmp_path)
    store.put_bytes("checkpoint-r1/weights/adapter_model.safetensors", adapter_bytes(8, 20))
    with pytest.raises(CorruptArtifact, match="SHA-256"):
        Publish(HostContext(settings)).publish(request)


def test_the_card_is_the_same_text_for_the_same_run(store, tmp_path: Path) -> None:
    run = request_for(store, tmp_path).run
    other_clock = METRICS | {"step_s": 5.0, "sampling_seconds": 1.0, "tokens_per_s": 1.0}
    card = model_card(run, METRICS, {"num_rows": 1}, {})
    assert card == model_card(run, other_clock, {"num_rows": 1}, {})
    assert card != model_card(run, METRICS | {"loss": 0.3}, {"num_rows": 1}, {})
    assert "PEFT" not in card
    assert REGISTERING in model_card(run, METRICS, {}, {"exclude_modules": ".*", "target_parameters": ["experts"]})


def test_a_result_is_recorded_and_taken_away_when_the_run_goes_on(settings, store: LocalStore) -> None:
    record = RunRecords(HostContext(settings))
    status = RunStatus(run_id="r1", state="cancelled", step=3)
    record.record_result(status)
    assert RunStatus.model_validate_json(store.get_bytes(RunKeys("r1").result)) == status
    ended = result_sha256(store, "r1")
    resumed = BeginRequest(run_id="r1", start_id="b", execution="2", resumed=True, goes_on_from=ended)
    for _ in range(2):  # once more, as after a killed host
        assert record.begin(resumed) == Begun(status=status)
    assert store.head(RunKeys("r1").result) is None


def test_a_start_is_good_for_one_workflow_and_for_the_end_that_it_goes_on_from(settings, store: LocalStore) -> None:
    record, cancelled = RunRecords(HostContext(settings)), RunStatus(run_id="r1", state="cancelled", step=3)

    def begin(start_id: str, execution: str, resumed: bool = False, goes_on_from: str | None = None) -> Begun:
        request = BeginRequest(
            run_id="r1", start_id=start_id, execution=execution, resumed=resumed, goes_on_from=goes_on_from
        )
        return record.begin(request)

    assert begin("a", "1") == begin("a", "1") == Begun()
    assert "used before" in (begin("a", "2").refusal or ""), "though the run has not ended"
    assert begin("b", "2") == Begun(), "Temporal lost it, and the service starts it anew"
    record.record_result(cancelled)
    first_end = result_sha256(store, "r1")
    assert "has ended" in (begin("c", "3").refusal or "")
    assert "has ended" in (begin("d", "4", resumed=True).refusal or ""), "of an end that it does not know"
    assert begin("e", "5", True, first_end) == Begun(status=cancelled)
    record.record_result(RunStatus(run_id="r1", state="succeeded", step=4))
    for number, start_id in enumerate("aef"):
        assert begin(start_id, f"x{number}", start_id != "a", first_end).refusal
    assert record.begin(
        BeginRequest(run_id="r1", start_id="e", execution="5", resumed=True, goes_on_from=first_end)
    ).refusal, "nor by the same workflow, set back to its beginning"
    assert result_sha256(store, "r1") not in (None, first_end)
