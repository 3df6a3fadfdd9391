"""Answers with labels into units of KTO, through a model's own tokenizer; and what is refused, by its row and rule."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from pydantic import ValidationError

from activities.tokenizing.tokenize import preview_of, write_units
from activities.tokenizing.tokenizer import ModelTokenizer
from longshore.losses import KTO
from longshore.views import PreviewRequest, Report
from megatron_worker.losses import check_columns
from shared.errors import InvalidInput
from shared.jobs.packed import Units
from tests.activities.templates import open_model, tokenizer_json, write_model
from tests.activities.test_pair_tokens import answer, supervised, turns
from tests.activities.tokenizing.test_tokenize import ids_up_to, request_of, rows_in

Part = tuple[str, str, set[float], set[float]]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return open_model(write_model(tmp_path_factory.mktemp("chatml"), "chatml"))


def tokenize(tmp_path: Path, tokenizer: ModelTokenizer, *rows: Any, **fields: Any) -> Report:
    return write_units(rows_in(tmp_path, *rows), tokenizer, request_of(labels=True, **fields), tmp_path / "units")


def parts_in(folder: Path, tokenizer: ModelTokenizer) -> list[list[Part]]:
    """Of both sequences of each unit: the text up to the last target, the targets, advantages and weights."""
    found = []
    with Units(folder) as units:
        check_columns(units, KTO())
        for unit in range(units.header.num_units):
            packed, parts = units.read_bin(np.array([unit])), []
            for sequence in (0, 1):
                own = packed.sequence_N == sequence
                ids = [*ids_up_to(packed, packed.hidden_index_N[own][-1]), int(packed.label_N[own][-1])]
                scored = tokenizer.decode(packed.label_N[own].tolist())
                signs = set(packed.advantage_N[own].tolist()), set(packed.weight_N[own].tolist())
                parts.append((tokenizer.decode(ids), scored, *signs))
            found.append(parts)
    return found


def asked(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


ROWS = [
    {"prompt": "How many?", "completion": "12 sacks.", "label": True},
    {"prompt": turns(("user", "And crates?")), "completion": answer("No."), "label": False},
    {"prompt": turns(("user", "a"), ("assistant", "b"), ("user", "c")), "completion": "7", "label": 1},
]


def test_an_answer_stands_beside_that_of_the_row_before_and_the_first_row_comes_last(
    tmp_path: Path, chatml: ModelTokenizer
) -> None:
    report = tokenize(tmp_path, chatml, *ROWS[:2], {"prompt": "Which quay?", "completion": "7", "label": 1})
    assert parts_in(tmp_path / "units", chatml) == [
        [
            (asked("And crates?") + "No.<|im_end|>", "No.<|im_end|>", {-1.0}, {1.0}),
            (asked("And crates?") + "12 sacks.<|im_end|>", "12 sacks.<|im_end|>", {0.0}, {0.0}),
        ],
        [
            (asked("Which quay?") + "7<|im_end|>", "7<|im_end|>", {1.0}, {1.0}),
            (asked("Which quay?") + "No.<|im_end|>", "No.<|im_end|>", {0.0}, {0.0}),
        ],
        [
            (asked("How many?") + "12 sacks.<|im_end|>", "12 sacks.<|im_end|>", {1.0}, {1.0}),
            (asked("How many?") + "7<|im_end|>", "7<|im_end|>", {0.0}, {0.0}),
        ],
    ]
    trained = sum(len(chatml.tokens_of(text)) for text in ("12 sacks.<|im_end|>", "No.<|im_end|>", "7<|im_end|>"))
    assert (report.num_rows, report.num_kept, report.num_targets) == (3, 3, trained)


def test_an_answer_has_the_tokens_of_supervised_training(tmp_path: Path, chatml: ModelTokenizer) -> None:
    messages = turns(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "7"))
    rows = [{"messages": messages, "label": True}, {"messages": [*messages[:3], *answer("eight")], "label": False}]
    tokenize(tmp_path, chatml, *rows)
    units = parts_in(tmp_path / "units", chatml)
    assert [parts[0][1] for parts in units] == ["eight<|im_end|>", "7<|im_end|>"]
    found = [parts[0][0] for parts in units]
    masked = [messages[0], messages[1] | {"weight": 0}, messages[2]]
    alone = [
        chatml.decode(supervised(tmp_path, chatml, {"messages": [*masked, *answer(text)]})[0])
        for text in ("eight", "7")
    ]
    assert found == alone


def test_a_pair_is_a_good_answer_and_a_bad_one_each_beside_its_like(tmp_path: Path, chatml: ModelTokenizer) -> None:
    rows = [{"prompt": f"q{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(3)]
    report = tokenize(tmp_path, chatml, *rows)
    told = [(own[1], own[2], other[1]) for own, other in parts_in(tmp_path / "units", chatml)]
    end = "<|im_end|>"
    assert told == [
        (f"{word} {n}{end}", {sign}, f"{word} {(n - 1) % 3}{end}")
        for n in (1, 2, 0)
        for word, sign in (("good", 1.0), ("bad", -1.0))
    ]
    assert report.num_kept == 6


def test_a_model_without_a_template_has_plain_texts(tmp_path: Path) -> None:
    files = {"tokenizer.json": tokenizer_json().encode(), "tokenizer_config.json": b'{"eos_token": "</s>"}'}
    tokenizer = ModelTokenizer(files, "model")
    rows = [{"prompt": f"q{n}", "completion": f" {text}", "label": n % 2} for n, text in enumerate(("yes", "no"))]
    tokenize(tmp_path, tokenizer, *rows)
    told = [[(part[0], part[2]) for part in parts] for parts in parts_in(tmp_path / "units", tokenizer)]
    end = tokenizer.eos
    assert told == [
        [(f"q1 no{end}", {1.0}), (f"q1 yes{end}", {0.0})],
        [(f"q0 yes{end}", {-1.0}), (f"q0 no{end}", {0.0})],
    ]


def test_labels_of_parquet_columns_and_fields_of_other_names_are_read(tmp_path: Path, chatml: ModelTokenizer) -> None:
    (tmp_path / "rows").mkdir()
    rows = [{"question": f"q{n}", "response": f"r{n}", "label": n != 1, "source": "quay"} for n in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows" / "d.parquet")
    request = request_of(labels=True, prompt_field="question", completion_field="response")
    report = write_units(tmp_path / "rows", chatml, request, tmp_path / "units")
    signs = [parts[0][2] for parts in parts_in(tmp_path / "units", chatml)]
    assert signs == [{-1.0}, {1.0}, {1.0}] and report.warnings == ("nobody reads the columns 'source'",)


def test_a_preview_counts_what_a_run_would_train(tmp_path: Path, chatml: ModelTokenizer) -> None:
    report = tokenize(tmp_path, chatml, *ROWS)
    request = PreviewRequest(source={"uri": "file:///rows"}, model_uri="m", max_tokens=100, labels=True)
    found = preview_of(tmp_path / "rows", chatml, request)
    assert found.report == report and found.rows == () and found.problem is None


def test_examples_are_never_cut_and_too_long_with_the_other_answer(tmp_path: Path, chatml: ModelTokenizer) -> None:
    tokenize(tmp_path, chatml, *ROWS)
    with Units(tmp_path / "units") as units:
        longest = int(np.diff(units.token_offsets).max())
    report = tokenize(tmp_path, chatml, *ROWS, max_tokens=longest - 1)
    assert (report.num_kept, report.num_too_long) == (2, 1)
    with pytest.raises(ValidationError, match="pairs are never cut"):
        request_of(labels=True, too_long="truncate")


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"prompt": "p", "completion": "c"}, r"rows.jsonl:1.*prompt_completion; kto learns from answers with a label"),
        ({"prompt": "p", "completion": "c", "label": "good"}, "label must be true or false, not text"),
        ({"prompt": "p", "completion": "c", "label": 2}, "label must be true or false"),
        ({"prompt": "p", "completion": "c", "label": True, "weight": 0.5}, "weight must be 1 or absent: kto weighs"),
        (
            {"messages": turns(("user", "q"), ("assistant", "a")) + turns(("user", "q")), "label": True},
            "the last message is the user's: a label is of the answer",
        ),
        (
            {"messages": [*turns(("user", "q")), {"role": "assistant", "content": "a", "weight": 0}], "label": True},
            "weight must be 1 or absent",
        ),
        ({"text": "a line", "label": 1}, "kto learns from answers with a label.*: this row has no answer"),
        ({"prompt": "p", "completion": "c", "label": True}, "rows.jsonl:1.*there is no other row"),
    ],
)
def test_what_kto_cannot_learn_from_is_refused(
    tmp_path: Path, chatml: ModelTokenizer, row: dict[str, Any], rule: str
) -> None:
    with pytest.raises(InvalidInput, match=rule):
        tokenize(tmp_path, chatml, row)


def test_a_row_without_a_label_behind_others_is_refused_by_its_line(tmp_path: Path, chatml: ModelTokenizer) -> None:
    rows = [*ROWS[:1] * 40, {"prompt": "p", "completion": "c"}]
    with pytest.raises(InvalidInput, match=r"rows.jsonl:41.*no field 'label'"):
        tokenize(tmp_path, chatml, *rows)


def test_answers_with_labels_are_no_pairs_and_bad_ones_no_examples(tmp_path: Path, chatml: ModelTokenizer) -> None:
    folder = rows_in(tmp_path, ROWS[1])
    with pytest.raises(InvalidInput, match=r"dpo learns from pairs.*are what the objective kto learns from"):
        write_units(folder, chatml, request_of(pairs=True), tmp_path / "units")
    with pytest.raises(InvalidInput, match=r"label is false.*or train by kto"):
        write_units(folder, chatml, request_of(), tmp_path / "units")
