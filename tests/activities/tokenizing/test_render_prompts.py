"""Datasets into prompts: the ids that training shows before an answer, any row by its number, refusals with a place."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.tokenizing.render_prompts import (
    PromptRow,
    Prompts,
    PromptsFile,
    PromptsReport,
    PromptsRequest,
    RenderPrompts,
    ids_before_answers,
    mix_rows,
    write_prompts,
)
from activities.tokenizing.tokenize import TokenizeRequest, write_units
from activities.tokenizing.tokenizer import ModelTokenizer
from examples.tiny_model import train_tokenizer
from longshore.dataset_runs import DatasetSource
from longshore.fields import Artifact
from shared.errors import InvalidInput
from shared.jobs.packed import Units
from shared.settings import Settings
from shared.storage.artifacts import seal, stage, upload_artifact
from shared.storage.store import LocalStore
from tests.activities.templates import TEMPLATES, open_model, tokenizer_json, write_model

ARTIFACT = Artifact(uri="file:///unused", sha256="0" * 64)
USER, ASSISTANT = "user", "assistant"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelTokenizer]:
    """A tokenizer for each template, and one without any."""
    folder = tmp_path_factory.mktemp("models")
    plain = {"tokenizer.json": tokenizer_json().encode(), "tokenizer_config.json": b'{"eos_token": "</s>"}'}
    return {name: open_model(write_model(folder / name, name)) for name in TEMPLATES} | {
        "none": ModelTokenizer(plain, "plain")
    }


def request_of(**fields: Any) -> PromptsRequest:
    source = {"uri": "file:///rows", **{k: fields.pop(k) for k in list(fields) if k in DatasetSource.model_fields}}
    return PromptsRequest.model_validate(
        {"dataset": ARTIFACT, "model": ARTIFACT, "source": source, "max_prompt_tokens": 500} | fields
    )


def rows_in(folder: Path, *rows: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def prompts(
    tmp_path: Path, tokenizer: ModelTokenizer, *rows: Any, **fields: Any
) -> tuple[list[PromptRow], PromptsReport]:
    folder = tmp_path / "prompts"
    folder.mkdir(parents=True, exist_ok=True)
    report = write_prompts(rows_in(tmp_path / "rows", *rows), tokenizer, request_of(**fields), folder)
    with PromptsFile(folder) as file:
        return [file[i] for i in range(len(file))], report


def trained_from(folder: Path, tokenizer: ModelTokenizer, *rows: Any, **source: Any) -> list[list[int]]:
    """What SFT writes before the first trained token of each row."""
    request = TokenizeRequest.model_validate(
        {"dataset": ARTIFACT, "model": ARTIFACT, "source": {"uri": "file:///r", **source}, "max_tokens": 4096}
    )
    write_units(rows_in(folder / "sft", *rows), tokenizer, request, folder / "units")
    with Units(folder / "units") as units:
        bins = [units.read_bin(np.array([u])) for u in range(units.header.num_units)]
    return [each.token_id_T[: int(each.hidden_index_N.min()) + 1].tolist() for each in bins]


def turns(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def a_text(random: Random) -> str:
    return "".join(random.choices("abc 12\n.,éß船🐟{}", k=random.randint(1, 30)))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_is_what_sft_shows_before_the_answer(
    models: dict[str, ModelTokenizer], tmp_path: Path, template: str
) -> None:
    random, rows, sft_rows = Random(template), list[Any](), list[Any]()
    # Mistral's template puts a space before the answer, which no prompt has: it is part of the first word's token.
    beginnings = ["There ", "crate "] if template == "mistral" else ["A", "7", "é", "船"]
    for number in range(100):
        asked = turns(("system", a_text(random))) if number % 2 and template != "mistral" else []
        asked = [*asked, *turns((USER, a_text(random)))]
        rows.append({"messages": asked, "answer": number})
        # An answer that begins with a sign can melt into the token before it: no prompt can know that.
        sft_rows.append({"messages": asked + turns((ASSISTANT, random.choice(beginnings) + a_text(random)))})
    expected = trained_from(tmp_path, models[template], *sft_rows)
    found, report = prompts(tmp_path, models[template], *rows)
    with_answers, other = prompts(tmp_path, models[template], *sft_rows)
    assert [list(row.token_ids) for row in found] == [list(row.token_ids) for row in with_answers] == expected
    assert (report.num_answers, other.num_answers) == (0, 100)
    assert [row.item for row in with_answers] == sft_rows


def test_a_letter_that_melts_into_the_text_is_no_stand_in(models: dict[str, ModelTokenizer]) -> None:
    parted = models["none"]
    assert [*ids_before_answers(["crate\n\n"], parted)] != [parted.tokens_of("crate\n\n")]
    joined = tokenizer_of("quayA\nquay A\n" * 20)
    assert len(joined.tokens_of(" A")) == len(joined.tokens_of("quayA")) == 1
    for text in ("crate ", "quay", "a quay ", "quay\n\n", "quay: "):
        for tokenizer in (parted, joined):
            [found] = ids_before_answers([text], tokenizer)
            assert tokenizer.decode(found) == text
    assert [*ids_before_answers(["a quay "], joined)] == [joined.tokens_of("a quay ")]


def tokenizer_of(corpus: str) -> ModelTokenizer:
    """Byte-level BPE that joins what its corpus joins, with a model that has no chat template."""
    tokenizer = train_tokenizer([corpus], vocab_size=300)
    return ModelTokenizer({"tokenizer.json": tokenizer.to_str().encode()}, "plain")


def test_earlier_turns_are_rendered_as_history(models: dict[str, ModelTokenizer], tmp_path: Path) -> None:
    earlier = turns((USER, "How many?"), (ASSISTANT, "<think>\nhm\n</think>\n\n12"), (USER, "And now?"))
    for name in ("chatml", "llama", "qwen", "mistral"):
        row = {"messages": earlier + turns((ASSISTANT, "7"))}
        weights = [m | ({"weight": 0} if m["content"].startswith("<think>") else {}) for m in row["messages"]]
        [expected] = trained_from(tmp_path / name, models[name], {"messages": weights})
        [found], _ = prompts(tmp_path / name, models[name], row)
        assert list(found.token_ids) == expected


def test_tools_and_their_answers_are_shown(models: dict[str, ModelTokenizer], tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "tide", "parameters": {}}}]
    call = {"role": ASSISTANT, "content": "", "tool_calls": [{"function": {"name": "tide", "arguments": {}}}]}
    asked = [*turns((USER, "High water?")), call, {"role": "tool", "content": "06:30"}]
    [found], _ = prompts(tmp_path, models["qwen"], {"messages": asked, "tools": tools})
    text = models["qwen"].decode(found.token_ids)
    assert '<tools>\n{"type": "function"' in text and "<tool_response>\n06:30" in text
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("template", ["chatml", "none"])
@pytest.mark.parametrize(
    ("row", "source"),
    [
        ({"prompt": "How many?"}, {}),
        ({"prompt": "How many?", "text": "a column of the user's", "messages": None}, {"format": "prompt_completion"}),
        ({"question": "How many?"}, {"prompt_field": "question"}),
        ({"instruction": "How", "input": "many?"}, {}),
    ],
    ids=["prompt", "named format", "named field", "alpaca"],
)
def test_a_text_is_asked_as_in_sft(
    models: dict[str, ModelTokenizer], tmp_path: Path, template: str, row: dict[str, Any], source: dict[str, Any]
) -> None:
    sft = source | ({"completion_field": "answer"} if "prompt_field" in source else {})
    answered = row | {"completion": "A12", "answer": "A12", "output": "A12"}
    [expected] = trained_from(tmp_path, models[template], answered, **sft)
    [found], _ = prompts(tmp_path, models[template], row, **source)
    assert list(found.token_ids) == expected
    assert found.item == row


def test_messages_may_stand_in_a_named_field(models: dict[str, ModelTokenizer], tmp_path: Path) -> None:
    asked = turns((USER, "How many?"))
    [found], _ = prompts(tmp_path, models["chatml"], {"question": asked}, prompt_field="question")
    [other], _ = prompts(tmp_path, models["chatml"], {"conversations": [{"from": "human", "value": "How many?"}]})
    assert found.token_ids == other.token_ids
    assert models["chatml"].decode(found.token_ids).startswith("<|im_start|>user\nHow many?<|im_end|>")


def test_too_long_prompts_are_left_out_and_counted(models: dict[str, ModelTokenizer], tmp_path: Path) -> None:
    rows = [{"prompt": "crate " * (40 if i % 5 == 3 else 2), "number": i} for i in range(20)]
    found, report = prompts(tmp_path, models["chatml"], *rows, max_prompt_tokens=40, max_lost_fraction=0.2)
    assert [row.item["number"] for row in found] == [i for i in range(20) if i % 5 != 3]
    assert (report.num_rows, report.num_prompts, report.num_too_long) == (20, 16, 4)
    assert report.lost[0].place == "rows.jsonl:4" and report.longest_tokens > 40
    assert report.probe == found[0].token_ids
    with pytest.raises(
        InvalidInput, match=r"4 of 20 prompts are too long.*max_lost_fraction 0.19; first: rows.jsonl:4"
    ):
        prompts(tmp_path, models["chatml"], *rows, max_prompt_tokens=40, max_lost_fraction=0.19)
    with pytest.raises(InvalidInput, match=r"all 20 prompts are too long: the shortest has 2\d tokens, and 3 leave"):
        prompts(tmp_path, models["chatml"], *rows, max_prompt_tokens=3, max_lost_fraction=1)


def test_rows_beyond_a_batch_keep_their_order_and_are_found_by_number(
    models: dict[str, ModelTokenizer], tmp_path: Path
) -> None:
    rows = [{"prompt": f"crate {i} é{'x' * (i % 7)}", "i": i} for i in range(1200)]
    found, _ = prompts(tmp_path, models["none"], *rows)
    assert [row.item for row in found] == rows
    assert [models["none"].decode(row.token_ids) for row in found] == [row["prompt"] for row in rows]
    with PromptsFile(tmp_path / "prompts") as file:
        assert file[700] == found[700] and file[3] == found[3]


@pytest.mark.parametrize(
    ("row", "source", "message"),
    [
        ({"text": "a"}, {}, r"rows.jsonl:2: the row asks nothing: it has the fields 'text'"),
        ({"prompt": "a", "messages": []}, {}, r"rows.jsonl:2: the row matches chat and prompt_completion: say which"),
        ({"messages": turns((USER, "a"))}, {}, r"rows.jsonl:2: this row looks like chat, but rows.jsonl:1 looks like"),
        ({"prompt": 7}, {"format": "prompt_completion"}, r"rows.jsonl:2: prompt must be a list, not a number"),
        ({"q": "a"}, {"prompt_field": "prompt"}, r"rows.jsonl:2: the row has no field 'prompt'; it has 'q'"),
        ({"prompt": turns(("system", "a"))}, {}, r"rows.jsonl:2: prompt: the message to answer is the system's"),
        ({"prompt": turns((ASSISTANT, "a"))}, {}, r"rows.jsonl:2: prompt: the message to answer is missing"),
        ({"prompt": "a", "n": 1e999}, {}, r"rows.jsonl:2: invalid JSON: Infinity is not JSON"),
        ({"prompt": "a"}, {"format": "text"}, r"format: rows of the format text ask nothing"),
        ({"prompt": "a"}, {"format": "chat", "prompt_field": "prompt"}, r"format: rows of the format chat have no"),
    ],
)
def test_what_asks_nothing_is_refused_with_its_place(
    models: dict[str, ModelTokenizer], tmp_path: Path, row: dict[str, Any], source: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        prompts(tmp_path, models["chatml"], {"prompt": "a"}, row, **source)


def test_conversations_need_a_template_and_prompts_a_token(models: dict[str, ModelTokenizer], tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"rows.jsonl:1: the model has no chat template"):
        prompts(tmp_path, models["none"], {"messages": turns((USER, "a"))})
    with pytest.raises(InvalidInput, match=r"rows.jsonl:1: the prompt is empty"):
        prompts(tmp_path, models["none"], {"prompt": ""})
    with pytest.raises(
        InvalidInput, match=r"1 of 2 prompts are refused by .*; first: rows.jsonl:2 .*roles must alternate"
    ):
        rows = [turns((USER, "a")), turns((USER, "a"), (USER, "b"))]
        prompts(tmp_path, models["mistral"], *({"messages": row} for row in rows))
    (tmp_path / "rows" / "rows.jsonl").write_text('{"prompt": "a", "n": 1e999}\n')
    with pytest.raises(InvalidInput, match=r"rows.jsonl:1: the row holds a number beyond"):
        write_prompts(tmp_path / "rows", models["chatml"], request_of(), tmp_path / "prompts")


def test_a_parquet_row_is_an_item_too(models: dict[str, ModelTokenizer], tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "rows").mkdir()
    row = {"messages": turns((USER, "How many?")), "answer": {"n": [1, 2]}, "ids": [1, 2, 3], "score": float("nan")}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows" / "rows.parquet")
    (tmp_path / "prompts").mkdir()
    write_prompts(tmp_path / "rows", models["chatml"], request_of(), tmp_path / "prompts")
    with PromptsFile(tmp_path / "prompts") as file:
        assert file[0].item == row | {"score": None}
    parquet.write_table(pyarrow.Table.from_pylist([row | {"raw": b"x"}]), tmp_path / "rows" / "rows.parquet")
    with pytest.raises(InvalidInput, match=r"rows.parquet: row 1: raw holds a bytes, which graders cannot be shown"):
        write_prompts(tmp_path / "rows", models["chatml"], request_of(), tmp_path / "prompts")


def test_the_activity_renders_the_same_rows_once(tiny_model: Path, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "given")
    rows = rows_in(tmp_path / "rows", *({"prompt": f"crate {i}"} for i in range(5)))
    artifacts = {}
    model = shutil.copytree(tiny_model, tmp_path / "model")  # all tests share the other, unsealed
    for name, folder in (("dataset", rows), ("model", model)):
        seal(folder)
        artifacts[name] = upload_artifact(store, name, folder)
    own = Settings(root=tmp_path / "machine")

    def render(request: PromptsRequest) -> Prompts:
        found: Prompts = ActivityEnvironment().run(RenderPrompts(HostContext(own)).render_prompts, request)
        return found

    first = render(request_of(**artifacts))
    assert (first.num_prompts, first.num_too_long, len(first.probe) >= 2) == (5, 0, True)
    report = json.loads(Path(first.report_uri.removeprefix("file://")).read_text())
    assert report["format"] == "prompt_completion"
    (tmp_path / "given" / "dataset" / "rows.jsonl").unlink()
    assert render(request_of(**artifacts, uri="s3://elsewhere")) == first, "nothing is read again"
    with pytest.raises(Exception, match="missing"):
        render(request_of(**artifacts, max_prompt_tokens=400))
    with PromptsFile(stage(first.prompts, own.root_path / "cache", own.s3)) as file:
        assert file[0].token_ids == first.probe
    assert not list((tmp_path / "machine" / "scratch").iterdir())


def test_prompts_of_a_mixture_keep_their_rows_and_name_their_source(
    models: dict[str, ModelTokenizer], tmp_path: Path
) -> None:
    chat, _ = prompts(tmp_path / "a", models["chatml"], *({"messages": turns((USER, f"a {n}"))} for n in range(3)))
    long = ({"question": text} for text in ("short", "much too long " * 50, "brief"))
    field, report = prompts(
        tmp_path / "b", models["chatml"], *long, prompt_field="question", max_prompt_tokens=60, max_lost_fraction=0.5
    )
    assert report.num_too_long == 1
    (tmp_path / "mixed").mkdir()
    mix_rows({"chats": tmp_path / "a" / "prompts", "2": tmp_path / "b" / "prompts"}, tmp_path / "mixed")
    with PromptsFile(tmp_path / "mixed") as file:
        rows = [file[number] for number in range(len(file))]
    named = [("chats", row) for row in chat] + [("2", row) for row in field]
    assert rows == [replace(row, source=name, place=f"{name}/{row.place}") for name, row in named]
    assert rows[3].place == "2/rows.jsonl:1"
    mixed = PromptsReport.model_validate_json((tmp_path / "mixed" / "report.json").read_bytes())
    assert (mixed.num_rows, mixed.num_prompts, mixed.num_too_long) == (6, 5, 1)
    assert {name: (each.format, each.num_prompts) for name, each in mixed.sources.items()} == {
        "chats": ("chat", 3),
        "2": ("prompt_completion", 2),
    }
