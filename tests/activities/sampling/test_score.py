"""Samples to grades by a reward model in a real sampler: rendered as in training, and refused by name."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from temporalio.testing import ActivityEnvironment

from activities.formats.dataset import open_dataset
from activities.grading.grade import REWARDS, Grade, GradeRequest
from activities.host_context import HostContext
from activities.models.resolve import AdapterRequest, Resolve
from activities.sampling.sample import ScoreSamples, ScoreSamplesRequest, conversations
from activities.sampling.samplers import Samplers
from activities.tokenizing.encoding import encoded
from activities.tokenizing.render_prompts import PromptsRequest, RenderPrompts
from activities.tokenizing.tokenizer import tokenizer_files
from longshore.dataset_runs import DatasetSource
from longshore.fields import Artifact
from longshore.grading import GradeOneRequest, SampledItem, SampleGrade, SampleRewards
from longshore.training import Lora, ScalarHead
from shared.errors import InvalidInput
from shared.models.peft import HEAD_TENSORS, WEIGHTS
from shared.runs.acceptance import parse_grader
from shared.runs.status import RewardModel
from shared.serving import ServedSampler
from shared.settings import SamplingSettings, Settings
from shared.storage.artifacts import seal, stage, upload_artifact
from shared.storage.store import LocalStore
from tests.megatron_worker.sampler_process import running

NUM_SAMPLES = 40  # of three requests
NAMES = ("kind", "short")
SOURCE = DatasetSource(uri="file:///rows")
ANSWERS = ("Seven crates.", "", "\ufffd tide", "<|im_end|> and more")


def row(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Crates {number}?"}]}


def answer(number: int) -> str:
    return ANSWERS[number % len(ANSWERS)] if number else "long " * 400


@dataclass(frozen=True)
class Place:
    settings: Settings
    model: Artifact
    reward: RewardModel
    samples: Artifact
    prompts: Artifact
    folder: Path


def write_reward_model(folder: Path, model: Path, task: str = "SEQ_CLS") -> Path:
    """By PEFT, with factors that are not zero, and the names of its scalars."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    kind = AutoModelForSequenceClassification if task == "SEQ_CLS" else AutoModelForTokenClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        base = kind.from_pretrained(model, num_labels=len(NAMES))
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type=task)
        get_peft_model(base, config).save_pretrained(folder)
    save_file(load_file(folder / WEIGHTS), folder / WEIGHTS, {"scalars": json.dumps(NAMES)})
    return folder


@pytest.fixture(scope="module")
def place(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("scoring")
    store = LocalStore(folder / "given")
    write_reward_model(folder / "adapter", tiny_model)
    made = {}
    for name, rows in (
        ("rows", [row(number) for number in range(NUM_SAMPLES)]),
        ("samples", [{"sample": {"output_text": answer(n)}, "item": row(n)} for n in range(NUM_SAMPLES)]),
    ):
        (folder / name).mkdir()
        (folder / name / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        seal(folder / name)
        made[name] = upload_artifact(store, name, folder / name)
    config = json.loads((tiny_model / "config.json").read_text()) | {"max_position_embeddings": 256}
    shutil.copytree(tiny_model, folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(config))
    for each in (folder / "model", folder / "adapter"):
        seal(each)
    model = upload_artifact(store, "model", folder / "model")
    with running(folder / "model", folder) as sampler:
        sampling = SamplingSettings(url=sampler.url, api_key=sampler.api_key)
        settings = Settings(root=folder / "root", sampling=sampling)
        request = PromptsRequest(dataset=made["rows"], source=SOURCE, model=model, max_prompt_tokens=100)
        prompts = ActivityEnvironment().run(RenderPrompts(HostContext(settings)).render_prompts, request).prompts
        reward = RewardModel(
            scorer="file:///adapter",
            model=model,
            adapter=upload_artifact(store, "adapter", folder / "adapter"),
            head=ScalarHead(names=NAMES, per="sequence"),
            is_beside=False,
        )
        yield Place(settings, model, reward, made["samples"], prompts, folder)


def request_of(place: Place) -> ScoreSamplesRequest:
    return ScoreSamplesRequest(
        run_id="r1",
        samples=place.samples,
        source=SOURCE,
        prompts=place.prompts,
        reward=place.reward,
        dtype="float32",
        place=ServedSampler(),
    )


def scored(place: Place, root: Path) -> Artifact:
    host = HostContext(place.settings.model_copy(update={"root": root}))
    return ActivityEnvironment().run(ScoreSamples(host, Samplers(host.settings)).score_samples, request_of(place))


def lines_of(place: Place, made: Artifact) -> list[SampleRewards]:
    folder = stage(made, place.settings.root_path / "cache", place.settings.s3)
    return [SampleRewards.model_validate_json(line) for line in (folder / REWARDS).read_bytes().splitlines()]


def ids_of_training(place: Place, tmp_path: Path) -> list[tuple[tuple[int, ...], int]]:
    """The ids of the same conversations as a training set's, and the place behind the last one that is trained."""
    rows = [
        {"messages": [*row(n)["messages"], {"role": "assistant", "content": answer(n)}]} for n in range(NUM_SAMPLES)
    ]
    folder = tmp_path / "training"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    tokenizer = tokenizer_files(HostContext(place.settings), place.model).load()
    found = []
    for batch in encoded(open_dataset(folder, SOURCE), tokenizer):
        block = batch.block
        for first, num in zip(block.start_R, block.num_tokens_R, strict=True):
            last = max(place for place in range(num) if block.weight_T[first + place] > 0)
            found.append((tuple(block.id_T[first : first + num].tolist()), last + 1))
    return found


@pytest.mark.parametrize("ends_with_answer", [False, True])
def test_conversations_are_those_of_training(place, tmp_path, ends_with_answer) -> None:
    host = HostContext(place.settings)
    files = tokenizer_files(host, place.model)
    source = SOURCE.model_copy(update={"format": "chat"})
    found = [each.token_ids for each in conversations(host.stage(place.samples), files, {"": source}, ends_with_answer)]
    assert found == [ids[:end] if ends_with_answer else ids for ids, end in ids_of_training(place, tmp_path)]


def test_samples_of_a_mixture_are_read_as_their_source_is(place, tmp_path) -> None:
    messages = row(1)["messages"][1:]  # a text is a user's message
    chat = {"sample": {"output_text": "yes"}, "item": {"messages": messages}}
    mixed = [{"sample": {"output_text": "yes", "source": "a"}, "item": chat["item"]}]
    mixed += [{"sample": {"output_text": "yes", "source": "b"}, "item": {"question": messages[-1]["content"]}}]
    for name, samples in (("mixed", mixed), ("alone", [chat, chat])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    files = tokenizer_files(HostContext(place.settings), place.model)
    read_as = {
        "a": SOURCE.model_copy(update={"format": "chat"}),
        "b": DatasetSource(uri="file:///b", format="prompt_completion", prompt_field="question"),
    }
    found = list(conversations(tmp_path / "mixed", files, read_as, False))
    assert found == list(conversations(tmp_path / "alone", files, {"": read_as["a"]}, False))
    assert [each.refusal for each in found] == [None, None]


def test_scores_grade(place, tmp_path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    told = lines_of(place, scored(place, tmp_path / "one"))
    base = AutoModelForSequenceClassification.from_pretrained(place.folder / "model", num_labels=2)
    model = PeftModel.from_pretrained(base, place.folder / "adapter").eval()
    assert told[0].values == {} and "more than the reward model reads" in told[0].error
    for (ids, _), each in list(zip(ids_of_training(place, tmp_path), told, strict=True))[1:20]:
        with torch.no_grad():
            assert list(each.values.values()) == pytest.approx(model(torch.tensor([ids])).logits[0].tolist(), abs=1e-5)

    assert lines_of(place, scored(place, tmp_path / "two")) == told
    fields = {"type": "reward_model", "name": "kind", "model": place.reward.scorer, "scalar": "kind"}
    for grader, is_plain in (
        (fields, True),
        ({"type": "multi", "name": "m", "graders": {"a": fields}, "calculate_output": "2 * a"}, False),
    ):
        request = GradeRequest(
            samples=place.samples,
            grader=parse_grader(grader),
            rewards={place.reward.scorer: scored(place, tmp_path / "one")},
        )
        host = HostContext(place.settings)
        found = ActivityEnvironment().run(Grade(host).grade, request)
        assert (found.summary.num_failed, found.summary.num_samples) == (1, NUM_SAMPLES)
        lines = (stage(found.grades, host.paths.cache, host.settings.s3) / "grades.jsonl").read_bytes().splitlines()
        grades = [SampleGrade.model_validate_json(line) for line in lines]
        assert grades[1].grade == told[1].values["kind"] * (1 if is_plain else 2)


def test_a_score_that_is_not_finite_leaves_a_sample_without_a_grade(place, tmp_path) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    values = [SampleRewards(values={"kind": None, "short": 1.0})] * NUM_SAMPLES
    (folder / REWARDS).write_text("".join(each.model_dump_json() + "\n" for each in values))
    seal(folder)
    given = upload_artifact(LocalStore(tmp_path / "store"), "given", folder)
    fields = {"type": "reward_model", "name": "kind", "model": "m", "scalar": "kind"}
    request = GradeRequest(samples=place.samples, grader=parse_grader(fields), rewards={"m": given})
    found = ActivityEnvironment().run(Grade(HostContext(place.settings)).grade, request).summary
    assert found.num_graded == 0 and "no finite number" in found.reasons[0]


def test_a_reward_model_is_tried_by_nobody(place) -> None:
    grader = parse_grader({"type": "reward_model", "name": "kind", "model": "m"})
    request = GradeOneRequest(grader=grader, sample=SampledItem(sample={"output_text": "a"}))
    with pytest.raises(InvalidInput, match="they grade in runs alone"):
        ActivityEnvironment().run(Grade(HostContext(place.settings)).grade_one, request)
    ActivityEnvironment().run(Grade(HostContext(place.settings)).check_grader, grader)


def resolved(place: Place, folder: Path) -> Lora:
    request = AdapterRequest(uri=str(folder), tenant="default", role="reward_model", run_id="r1")
    settings = place.settings.model_copy(
        update={"download": place.settings.download.model_copy(update={"file_roots": (Path("/"),)})}
    )
    return ActivityEnvironment().run(Resolve(HostContext(settings)).resolve_adapter, request).lora


def test_adapters_that_are_no_reward_models_are_refused(place, tmp_path) -> None:
    assert resolved(place, place.folder / "adapter").head == ScalarHead(names=NAMES, per="sequence")
    own = load_file(place.folder / "adapter" / WEIGHTS)
    weight = own[HEAD_TENSORS[0]]
    for number, (changed, names, words) in enumerate(
        (
            (weight[:, 0], NAMES, "has the shape"),
            (weight * float("nan"), NAMES, "not finite"),
            (weight, ("a", "a"), "its own name"),
            (weight, 5, "are no list"),
        )
    ):
        folder = Path(shutil.copytree(place.folder / "adapter", tmp_path / str(number)))
        save_file(own | {HEAD_TENSORS[0]: changed.copy()}, folder / WEIGHTS, {"scalars": json.dumps(names)})
        with pytest.raises(InvalidInput, match=words):
            resolved(place, folder)
    plain = Path(shutil.copytree(place.folder / "adapter", tmp_path / "plain"))
    config = json.loads((plain / "adapter_config.json").read_text())
    config |= {"task_type": "CAUSAL_LM", "modules_to_save": None}
    (plain / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match="an adapter of a language model"):
        resolved(place, plain)
