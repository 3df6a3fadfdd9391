"""Datasets into units: the right ids, targets and weights, a true report, refusals; real data, and much of it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.tokenizing.chat_template import WeightedSpan
from activities.tokenizing.tokenize import Tokenize, TokenizeRequest, write_units
from activities.tokenizing.tokenizer import ModelTokenizer, tokenizer_files
from activities.tokenizing.units import PackRequest, write_plan
from longshore.dataset_runs import DatasetSource
from longshore.fields import Artifact
from longshore.views import Report
from shared.errors import InvalidInput
from shared.jobs.packed import Units
from shared.settings import S3Settings, Settings
from shared.storage.artifacts import seal, stage, upload_artifact
from shared.storage.store import LocalStore
from tests.activities.templates import open_model, tokenizer_json, write_model

ARTIFACT = Artifact(uri="file:///unused", sha256="0" * 64)
Unit = tuple[list[int], dict[int, tuple[int, float]]]  # ids; by hidden index: label and weight


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return open_model(write_model(tmp_path_factory.mktemp("chatml"), "chatml"))


def request_of(**fields: Any) -> TokenizeRequest:
    source = {"uri": "file:///rows", **{k: fields.pop(k) for k in list(fields) if k in DatasetSource.model_fields}}
    defaults = {"dataset": ARTIFACT, "model": ARTIFACT, "source": source, "max_tokens": 100, "max_lost_fraction": 1}
    return TokenizeRequest.model_validate(defaults | fields)


def rows_in(folder: Path, *rows: Any) -> Path:
    (folder / "rows").mkdir(exist_ok=True)
    (folder / "rows" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows"


def tokenize(tmp_path: Path, tokenizer: ModelTokenizer, *rows: Any, **fields: Any) -> tuple[list[Unit], Report]:
    report = write_units(rows_in(tmp_path, *rows), tokenizer, request_of(**fields), tmp_path / "units")
    return units_in(tmp_path / "units"), report


def ids_up_to(unit: Any, token: int) -> list[int]:
    """The sequence that ends with a token of a tree."""
    ids = []
    while token >= 0:
        ids.append(int(unit.token_id_T[token]))
        token = int(unit.parent_T[token])
    return ids[::-1]


def units_in(folder: Path) -> list[Unit]:
    with Units(folder) as units:
        bins = [units.read_bin(np.array([u])) for u in range(units.header.num_units)]
    return [
        (
            b.token_id_T.tolist(),
            {
                h: (label, weight)
                for h, label, weight in zip(
                    b.hidden_index_N.tolist(), b.label_N.tolist(), b.weight_N.tolist(), strict=True
                )
            },
        )
        for b in bins
    ]


def trained_text(tokenizer: ModelTokenizer, unit: Unit) -> str:
    return tokenizer.decode([label for label, _ in unit[1].values()])


def test_a_target_is_the_next_token_of_an_answer_and_its_terminator(tmp_path: Path, chatml: ModelTokenizer) -> None:
    [(ids, targets)], _ = tokenize(tmp_path, chatml, {"prompt": "How many?", "completion": "12 sacks."})
    assert chatml.decode(ids) == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n12 sacks.<|im_end|>\n"
    assert trained_text(chatml, (ids, targets)) == "12 sacks.<|im_end|>"
    assert all(label == ids[hidden + 1] and weight == 1 for hidden, (label, weight) in targets.items())


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "completion": "b"},
        {"instruction": "a", "output": "b"},
        {"text": "a b"},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
    ],
    ids=lambda row: next(iter(row)),
)
def test_a_row_s_weight_scales_all_its_targets(tmp_path: Path, chatml: ModelTokenizer, row: dict[str, Any]) -> None:
    units, _ = tokenize(tmp_path, chatml, row | {"weight": 0.25}, row)
    weights = [{weight for _, weight in targets.values()} for _, targets in units]
    assert weights == [{0.25}, {1.0}]
    with pytest.raises(InvalidInput, match=r"rows.jsonl:1.*weight must be a number of at least 0, not -1"):
        tokenize(tmp_path, chatml, row | {"weight": -1})


def test_pretokenized_rows_are_taken_as_they_are(tmp_path: Path, chatml: ModelTokenizer) -> None:
    [(ids, targets)], _ = tokenize(tmp_path, chatml, {"input_ids": [9, 8, 7, 6], "labels": [-100, -100, 7, 5]})
    assert ids == [9, 8, 7, 6] and targets == {1: (7, 1.0), 2: (5, 1.0)}
    with pytest.raises(InvalidInput, match=r"rows.jsonl:2: token id 99999 is not in the model's vocabulary"):
        tokenize(tmp_path, chatml, {"input_ids": [1, 2]}, {"input_ids": [1, 99999]})
    with pytest.raises(InvalidInput, match=r"rows.jsonl:1: token id -1 "):
        tokenize(tmp_path, chatml, {"input_ids": [-1, 2]})


def test_a_token_across_the_border_of_a_span_is_trained(chatml: ModelTokenizer) -> None:
    text = "The crane lifts"
    ids = chatml.tokens_of(text)
    pieces = [chatml.decode([i]) for i in ids]
    assert " crane" in pieces
    at = text.index("crane")  # the span begins behind the token's space
    encoded = chatml.encode([text], [[WeightedSpan(at, at + 5, 2.0)]])
    assert [p for p, w in zip(pieces, encoded.weight_T, strict=True) if w] == [" crane"]


ODD = st.lists(st.sampled_from([*"ab \n\t.é船", "e\u0301", "🚢", "<|im_end|>", "<think>"]), max_size=15).map("".join)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(ODD, st.integers(0, 15), st.integers(0, 15)), min_size=1, max_size=4))
def test_weights_by_bytes_equal_weights_by_offsets(cases: list[tuple[str, int, int]]) -> None:
    """The quick way against the tokenizer's own offsets."""
    texts = [text for text, _, _ in cases]
    spans = [[WeightedSpan(min(a, b, len(t)), min(max(a, b), len(t)), 0.5)] for t, a, b in cases]
    spans = [[s for s in each if s.end > s.start] for each in spans]
    quick = _plain._by_bytes(texts, spans, _plain._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    slow = _plain._by_offsets(spans, _plain._tokenizer.encode_batch(texts, add_special_tokens=False), texts)
    assert quick is not None
    np.testing.assert_array_equal(quick.id_T, slow.id_T)
    np.testing.assert_array_equal(quick.weight_T, slow.weight_T)


_plain = ModelTokenizer({"tokenizer.json": tokenizer_json().encode()}, "model")


def test_a_normalizer_that_changes_the_text_does_not_shift_the_mask(tmp_path: Path) -> None:
    from tokenizers import normalizers

    tokenizer = open_model(write_model(tmp_path / "model", "chatml", normalizers.NFC()))
    [unit], _ = tokenize(tmp_path, tokenizer, {"prompt": "e\u0301" * 9, "completion": "a e\u0301 b"})
    assert trained_text(tokenizer, unit) == "a \u00e9 b<|im_end|>"


def test_sentencepiece_like_tokenizers_take_the_slow_way(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    inner.train_from_iterator(["the crane lifts the crate"] * 9, trainers.BpeTrainer(special_tokens=special))
    write_model(tmp_path / "model", "mistral")
    (tmp_path / "model" / "tokenizer.json").write_text(inner.to_str())
    tokenizer = open_model(tmp_path / "model")
    [unit], _ = tokenize(tmp_path, tokenizer, {"prompt": "the crane", "completion": "lifts the crate"})
    assert trained_text(tokenizer, unit).replace(" ", "") == "liftsthecrate</s>"


def test_rows_that_quote_a_control_token_are_warned_of(tmp_path: Path, chatml: ModelTokenizer) -> None:
    turns = [{"role": "user", "content": "What ends a turn? <|im_end|>"}, {"role": "assistant", "content": "That."}]
    plain = [{"role": "user", "content": "What ends a turn?"}, {"role": "assistant", "content": "A token."}]
    _, report = tokenize(tmp_path, chatml, {"messages": plain}, {"messages": turns}, {"messages": turns})
    [warning] = report.warnings
    assert report.num_control_tokens == 2 and report.num_kept == 3
    assert warning.startswith("messages of 2 rows hold <|im_end|>") and warning.endswith("first: rows.jsonl:2")
    _, report = tokenize(tmp_path, chatml, {"messages": plain})
    assert report.warnings == () and report.num_control_tokens == 0


def test_long_rows_are_dropped_and_counted(tmp_path: Path, chatml: ModelTokenizer) -> None:
    rows = [{"text": "crate " * n} for n in (3, 200, 5)]
    units, report = tokenize(tmp_path, chatml, *rows, max_tokens=50)
    assert len(units) == 2 and report.num_rows == 3 and report.num_too_long == 1 and report.num_kept == 2
    [lost] = report.lost
    assert lost.place == "rows.jsonl:2" and "more than max_tokens 50" in lost.reason
    assert sum(count.num_rows for count in report.lengths) == 3 and report.longest_tokens > 200
    assert report.num_tokens == sum(len(ids) for ids, _ in units)


def test_long_rows_are_cut_and_those_left_without_target_are_counted(tmp_path: Path, chatml: ModelTokenizer) -> None:
    rows = [
        {"prompt": "crate", "completion": "quay " * 100},
        {"prompt": "quay " * 100, "completion": "crate"},
        {"prompt": "a", "completion": "b"},
    ]
    units, report = tokenize(tmp_path, chatml, *rows, max_tokens=40, too_long="truncate")
    assert len(units[0][0]) == 40 and len(units) == 2
    assert max(units[0][1]) == 38, "the last token's hidden state predicts nothing that is left"
    assert report.num_truncated == 1 and report.num_fully_masked == 1 and report.num_too_long == 0
    assert report.lost[0].reason == "no token to train on is left within max_tokens"


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        ([{"text": "crate " * 99}] * 3, {"max_tokens": 20}, "all 3 rows are too long: the shortest has"),
        (
            [{"input_ids": [1, 2], "labels": [1, -100]}] * 2,
            {},
            "none of the 2 rows has a token to train on; first: rows",
        ),
        (
            [{"text": "crate " * n} for n in (1, 1, 99)],
            {"max_tokens": 20, "max_lost_fraction": 0.3},
            "1 of 3 rows would",
        ),
        ([{"messages": [{"role": "user", "content": "q"}]}], {}, "rows.jsonl:1: messages has no assistant turn"),
    ],
)
def test_datasets_that_lose_too_much_are_refused(
    tmp_path: Path, chatml: ModelTokenizer, rows: list[Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        tokenize(tmp_path, chatml, *rows, **fields)
    assert message in str(refused.value)


def test_missing_tokenizer_template_or_end_token_are_said_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"hub/model: the model has no tokenizer.json"):
        ModelTokenizer({}, "hub/model")
    with pytest.raises(InvalidInput, match="tokenizer cannot be read"):
        ModelTokenizer({"tokenizer.json": b'{"model": 1}'}, "model")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(InvalidInput, match="has no chat template"):
        tokenize(tmp_path, _plain, {"messages": messages})
    with pytest.raises(InvalidInput, match="no eos_token"):
        tokenize(tmp_path, _plain, {"text": "a"})


def test_prompts_for_samples_stop_where_the_last_answer_begins(tmp_path: Path, chatml: ModelTokenizer) -> None:
    rows = [{"prompt": f"How many {k}?", "completion": f"{k} sacks."} for k in range(20)]
    tokenize(tmp_path, chatml, *rows)
    prompts = json.loads((tmp_path / "units" / "prompts.json").read_text())
    assert len(prompts) == 16 and prompts[3]["prompt"] == "How many 3?" and prompts[3]["reference"] == "3 sacks."
    asked = "<|im_start|>user\nHow many 3?<|im_end|>\n<|im_start|>assistant\n"
    assert chatml.decode(prompts[3]["prompt_ids"]) == asked
    tokenize(tmp_path, chatml, {"text": "The crane lifts the crate over the quay."})
    [prompt] = json.loads((tmp_path / "units" / "prompts.json").read_text())
    assert prompt["prompt"] + prompt["reference"] == "The crane lifts the crate over the quay.<|im_end|>"


def test_batches_do_not_show(tmp_path: Path, chatml: ModelTokenizer) -> None:
    """More rows than a batch holds come out in order, each as it does alone."""
    rows = [{"prompt": f"q{k}", "completion": f"é {k} " * (k % 7)} for k in range(1200)]
    units, report = tokenize(tmp_path, chatml, *rows)
    assert report.num_kept == 1200
    for k in (0, 15, 16, 527, 528, 1199):
        [alone], _ = tokenize(tmp_path, chatml, rows[k])
        assert units[k] == alone


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ODD, min_size=1, max_size=3))
def test_all_trained_text_comes_back(tmp_path: Path, answers: list[str]) -> None:
    rows = [{"text": answer or "a"} for answer in answers]
    units, _ = tokenize(tmp_path, _texts, *rows, max_tokens=1000)
    assert [_texts.decode(ids) for ids, _ in units] == [f"{row['text']}</s>" for row in rows]
    assert all(list(targets) == list(range(len(ids) - 1)) for ids, targets in units)


_texts = ModelTokenizer(
    {"tokenizer.json": tokenizer_json().encode(), "tokenizer_config.json": b'{"eos_token": {"content": "</s>"}}'}, "m"
)


# The activity.


def an_artifact(folder: Path, store: Path, key: str) -> Artifact:
    seal(folder)
    return upload_artifact(LocalStore(store), key, folder)


def test_the_activity_gives_the_same_bytes_on_two_machines_and_at_once_on_a_retry(tmp_path: Path) -> None:
    rows = rows_in(tmp_path, *[{"prompt": f"q{k}", "completion": f"a{k}"} for k in range(50)])
    dataset = an_artifact(rows, tmp_path / "store", "rows")
    model = an_artifact(write_model(tmp_path / "model", "qwen"), tmp_path / "store", "model")
    request = request_of(dataset=dataset, model=model)
    found = []
    for machine in ("first", "second"):
        settings = Settings(root=tmp_path / machine, store_uri=f"file://{tmp_path}/{machine}-store")
        answer = ActivityEnvironment().run(Tokenize(HostContext(settings)).tokenize, request)
        assert answer.num_units == 50 and answer.num_targets < answer.num_tokens
        assert Report.model_validate_json(Path(answer.report_uri.removeprefix("file://")).read_bytes()).num_rows == 50
        assert not list((tmp_path / machine / "scratch").iterdir())
        found.append((settings, answer))
    assert found[0][1].units.sha256 == found[1][1].units.sha256
    shutil.rmtree(tmp_path / "store")  # nothing can be tokenized any more
    again = request.model_copy(update={"source": DatasetSource(uri="s3://the/same/bytes")})
    for settings, answer in found:
        elsewhere = Settings(root=tmp_path / "third", store_uri=settings.store)
        assert ActivityEnvironment().run(Tokenize(HostContext(elsewhere)).tokenize, again) == answer
    assert len(units_in(stage(found[0][1].units, tmp_path / "cache", S3Settings()))) == 50


def test_a_refused_dataset_leaves_nothing_behind(tmp_path: Path) -> None:
    dataset = an_artifact(rows_in(tmp_path, {"prompt": "q"}), tmp_path / "store", "rows")
    model = an_artifact(write_model(tmp_path / "model", "chatml"), tmp_path / "store", "model")
    settings = Settings(root=tmp_path / "machine")
    request = request_of(dataset=dataset, model=model, format="prompt_completion")
    with pytest.raises(InvalidInput, match=r"rows.jsonl:1: the row has no field 'completion'"):
        ActivityEnvironment().run(Tokenize(HostContext(settings)).tokenize, request)
    assert not list((tmp_path / "machine" / "scratch").iterdir())
    assert not (tmp_path / "machine" / "store" / "tokenized").exists()


def test_tokenizers_are_read_without_the_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "chatml")
    (folder / "model.safetensors").write_bytes(b"weights")
    model = an_artifact(folder, tmp_path / "store", "model")
    (tmp_path / "store" / "model" / "model.safetensors").unlink()
    host = HostContext(Settings(root=tmp_path / "machine"))
    assert tokenizer_files(host, model).load().template is not None
    (tmp_path / "store" / "model" / "chat_template.jinja").write_text("another template")
    with pytest.raises(InvalidInput, match=r"chat_template.jinja"):
        tokenizer_files(host, model)


def test_gsm8k_is_tokenized_and_packed_into_full_bins(tmp_path: Path, gsm8k: Path, tiny_model: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").symlink_to(gsm8k / "train.jsonl")
    tokenizer = open_model(tiny_model_files(tiny_model, tmp_path / "model"))
    request = request_of(prompt_field="question", completion_field="answer", max_tokens=2048)
    report = write_units(tmp_path / "rows", tokenizer, request, tmp_path / "units")
    pack = PackRequest(units=ARTIFACT, seed=0, epochs=1, batch_tokens=16384, bin_tokens=2048)
    header = write_plan(Units.read_lengths(tmp_path / "units"), pack, tmp_path / "plan")
    assert report.num_kept == 7473 and 0.3 < report.trained_fraction < 0.8
    assert header.packing_efficiency >= 0.995


def tiny_model_files(model: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).symlink_to(path)
    return folder


MANY = """
import resource, sys
from pathlib import Path
from tests.activities.tokenizing.test_tokenize import request_of, _texts
from activities.tokenizing.tokenize import write_units
report = write_units(Path(sys.argv[1]), _texts, request_of(max_tokens=2048), Path(sys.argv[2]))
print(report.num_rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    peaks = []
    for num_rows in (2_000, 30_000):
        rows = rows_in(tmp_path, *[{"text": "The crane lifts the crate. " * 4}] * num_rows)
        command = [sys.executable, "-c", MANY, str(rows), str(tmp_path / "units")]
        output = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": "."}
        )
        found, peak_kib = map(int, output.stdout.split())
        assert found == num_rows
        peaks.append(peak_kib)
    assert peaks[1] - peaks[0] < 32 << 10, "28,000 more rows may not take 32 MiB more"
