"""What a row says reaches the model at every door, or the row is refused by name."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from activities.formats.dataset import open_dataset, open_prompts
from activities.formats.rows import Row, messages_of, tools_of
from activities.host_context import HostContext
from activities.sampling.questions import ChatPrompts
from activities.tokenizing.chat_template import ChatTemplate, Unrendered
from activities.tokenizing.encoding import encoded
from activities.tokenizing.render_prompts import PromptsRequest, PromptTally, rendered, write_prompts
from activities.tokenizing.tokenize import TokenizeRequest, preview_of, write_units
from activities.tokenizing.tokenizer import ModelTokenizer, TokenizerFiles
from activities.tokenizing.units import Tally
from activities.trajectories.read_groups import BrokenTrajectory, Conversations
from longshore.dataset_runs import DatasetSource
from longshore.fields import Artifact
from longshore.views import PreviewRequest
from shared.chat.trajectories import ChatTrajectory
from shared.errors import InvalidInput
from shared.settings import Settings
from shared.storage.artifacts import seal
from tests.activities.templates import CHATML, LLAMA, QWEN, SPECIAL, TEMPLATES, open_model, tokenizer_json

END = "<|im_end|>"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + PROMPT
ONLY_TEXTS = TURNS.replace("m.content +", "(m.content if m.content is string else '') +")
TOOLS_FIRST = (
    "{{ '<|im_start|>system\n<tools>' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '</tools><|im_end|>\n' }}"
)
WITH_TOOLS = "{% if tools %}" + TOOLS_FIRST + "{% endif %}" + TURNS
CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + CONTENT }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>\n' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson + '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}" + PROMPT
)
CALLING = CALLS.replace("CONTENT", "(m.content or '')")
# A template that needs a content, as Qwen3's first one; and one that writes calls where it is none, and texts as they
# are, as DeepSeek's.
NEEDS_CONTENT = CALLS.replace("CONTENT", "('' if '</think>' in m.content else m.content)")
NEEDS_TEXT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.tool_calls and m.content is none %}"
    "{% for c in m.tool_calls %}{{ c.function.name + '(' + c.function.arguments + ')' }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + PROMPT
)

TIDE = {
    "type": "function",
    "function": {
        "name": "tide",
        "parameters": {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]},
    },
}
FLAT = TIDE["function"]
OTHER_TOOLS: list[dict[str, Any]] = [
    FLAT,
    {"type": "function", **FLAT},  # Responses'
    {"name": "tide", "input_schema": FLAT["parameters"]},  # Anthropic's
    {"type": "custom", "name": "tide", "input_schema": FLAT["parameters"]},
    {"name": "tide", "inputSchema": FLAT["parameters"]},  # MCP's
    FLAT | {"parameters": json.dumps(FLAT["parameters"])},  # as Parquet files have it
    {"type": "function", "function": {"name": "tide", "inputSchema": FLAT["parameters"]}},
]
QUAY = json.loads(json.dumps(TIDE).replace("tide", "quay").replace("port", "number").replace("string", "integer"))
CALL = {"id": "call_1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Kiel"}'}}
ASK = {"role": "user", "content": "When?"}
ANSWER = {"role": "assistant", "content": "Half past six."}
PREVIEW = PreviewRequest(source=DatasetSource(uri="file:///rows"), model_uri="m")
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def model_of(template: str | list[dict[str, str]] | None, **config: Any) -> ModelTokenizer:
    files = {"chat_template": template, "eos_token": END, **config}
    return ModelTokenizer(
        {"tokenizer.json": tokenizer_json().encode(), "tokenizer_config.json": json.dumps(files).encode()}, "model"
    )


def folder_of(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    (tmp_path / "rows").mkdir(parents=True, exist_ok=True)
    (tmp_path / "rows" / "rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return tmp_path / "rows"


def trained(folder: Path, model: ModelTokenizer, **source: Any) -> list[tuple[str, str]]:
    """Each row's text, and what of it is trained."""
    found = []
    for batch in encoded(open_dataset(folder, DatasetSource(uri="file:///rows", **source)), model):
        block = batch.block
        for start, num in zip(block.start_R.tolist(), block.num_tokens_R.tolist(), strict=True):
            ids, weights = block.id_T[start : start + num], block.weight_T[start : start + num]
            found.append((model.decode(ids.tolist()), model.decode(ids[weights > 0].tolist())))
    return found


def trained_of(tmp_path: Path, template: Any, *rows: dict[str, Any], **source: Any) -> list[tuple[str, str]]:
    return trained(folder_of(tmp_path, *rows), model_of(template), **source)


def refusal(tmp_path: Path, template: Any, *rows: dict[str, Any]) -> str:
    with pytest.raises(InvalidInput) as refused:
        trained_of(tmp_path, template, *rows)
    return str(refused.value)


@pytest.mark.parametrize("template", [CALLING, NEEDS_CONTENT])
@pytest.mark.parametrize("content", [None, "", "absent"])
@pytest.mark.parametrize("arguments", ['{"port": "Kiel"}', {"port": "Kiel"}])
def test_a_call_is_trained_as_the_template_writes_calls(
    tmp_path: Path, template: str, content: str | None, arguments: Any
) -> None:
    called = CALLED | {"tool_calls": [CALL | {"function": {"name": "tide", "arguments": arguments}}]}
    called = {k: v for k, v in (called | {"content": content}).items() if v != "absent"}
    [(_, own)] = trained_of(tmp_path, template, {"messages": [ASK, called], "parallel_tool_calls": False})
    assert own == '<tool_call>\n{"name": "tide", "arguments": {"port": "Kiel"}}\n</tool_call>' + END


def test_a_template_that_wants_arguments_as_text_and_no_content_gets_that(tmp_path: Path) -> None:
    for called in (CALLED, CALLED | {"content": ""}, {"role": "assistant", "function_call": CALL["function"]}):
        [(_, own)] = trained_of(tmp_path, NEEDS_TEXT, {"messages": [ASK, called]})
        assert own == 'tide({"port": "Kiel"})' + END


def test_calls_that_a_template_does_not_write_are_refused(tmp_path: Path) -> None:
    for template in (TURNS, ONLY_TEXTS, LLAMA.replace("message.tool_calls", "false")):
        assert "shows no tool calls" in refusal(tmp_path, template, {"messages": [ASK, CALLED]})


def test_text_parts_are_one_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "How many sacks "}, {"type": "text", "text": "on quay 7?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Twelve sacks."}]}
    row = {"messages": [{"role": "user", "content": parts}, answer]}
    for template in (ONLY_TEXTS, TURNS):
        [(text, own)] = trained_of(tmp_path, template, row)
        assert "How many sacks on quay 7?" in text and own == f"Twelve sacks.{END}"
    parts[1] = {"type": "image_url", "text": "x"}
    assert "messages[0].content[1] must be a text part" in refusal(tmp_path, ONLY_TEXTS, row)


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "web_search", "name": "web"}, "tools[0].type must be function, not 'web_search'"),
        ({"name": "tide", "parameters": {}, "input_schema": {}}, "tools[0]: parameters and input_schema must be one"),
        ({"name": "tide", "inputSchema": ["text"]}, "tools[0]: inputSchema must be one object"),
        ({"name": "tide", "inputSchema": "text"}, "tools[0].inputSchema must be an object, not text"),
        ({"description": "Tells tides."}, "tools[0]: a tool is"),
    ],
)
def test_tools_that_are_none_are_refused_by_their_keys(tmp_path: Path, tool: dict[str, Any], words: str) -> None:
    assert words in refusal(tmp_path, WITH_TOOLS, {"messages": [ASK, ANSWER], "tools": [tool]})


THOUGHT = "('<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '')"
THINKING = TURNS.replace("m.content +", f"{THOUGHT} + m.content +")
PARTS = [{"type": "text", "text": "The moon "}, {"type": "text", "text": "says so."}]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_in_parts_are_one_text_and_others_are_refused(tmp_path: Path, key: str) -> None:
    row = {"messages": [ASK, ANSWER | {key: PARTS}]}
    [(_, own)] = trained_of(tmp_path, THINKING, row)
    assert own == f"<think>The moon says so.</think>Half past six.{END}"
    for other in ({"text": "a"}, ["a"], 7, [{"type": "image_url", "text": "a"}]):
        assert f"messages[1].{key}" in refusal(tmp_path, THINKING, {"messages": [ASK, ANSWER | {key: other}]})
    for other in {"reasoning_content", "reasoning", "thinking"} - {key}:
        both = ANSWER | {key: PARTS, other: "The moon says so."}
        assert trained_of(tmp_path, THINKING, {"messages": [ASK, both]})[0][1] == own
        assert "differ: give one" in refusal(tmp_path, THINKING, {"messages": [ASK, both | {other: "No."}]})


def test_what_nobody_reads_is_named_in_every_format(tmp_path: Path) -> None:
    asked, answer = ASK | {"mood": "calm"}, ANSWER | {"tone": "dry"}
    spoken = [{"from": "human", "value": "When?", "mood": "calm"}, {"from": "gpt", "value": "Now.", "tone": "dry"}]
    rows: list[dict[str, Any]] = [
        {"messages": [asked, answer]},
        {"conversations": spoken},
        {"prompt": [asked], "completion": [answer]},
        {"prompt": [asked], "chosen": [answer], "rejected": [ANSWER | {"content": "No."}]},
        {"chosen": [asked, answer], "rejected": [asked, ANSWER | {"content": "No."}]},
        {
            "input": {"messages": [asked], "hint": "a"},
            "preferred_output": [answer],
            "non_preferred_output": [ANSWER | {"content": "No."}],
        },
    ]
    for row in rows:
        report = preview_of(folder_of(tmp_path, row | {"quay": 7}), model_of(TURNS), PREVIEW).report
        columns, keys = report.warnings
        assert "'quay'" in columns and ("input.hint" in columns) == ("input" in row)
        assert "the keys 'mood', 'tone' of messages" in keys


def test_turns_of_sharegpt_have_what_messages_have(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "When?"}, {"from": "gpt", "value": "Now.", "reasoning_content": "It is."}]
    [(_, own)] = trained_of(tmp_path, THINKING, {"conversations": turns})
    assert own == f"<think>It is.</think>Now.{END}"
    turns[0]["images"] = ["quay.png"]  # type: ignore[assignment]
    assert "conversations[0].images" in refusal(tmp_path, THINKING, {"conversations": turns})


FLAGS = ("train", "loss", "trainable")


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_other_trainers_are_weights(tmp_path: Path, flag: str) -> None:
    """In messages of every format: chats, ShareGPT's, and completions of messages."""
    first, last = ANSWER | {"content": "Never ask again."}, ANSWER | {flag: True}
    for off in ({flag: False}, {flag: False, "weight": 0}, dict.fromkeys(FLAGS, False)):
        turns = [ASK | {flag: False}, first | off, ASK, last]
        spoken = [{"from": {"user": "human"}.get(t["role"], "gpt"), "value": t["content"], **t} for t in turns]
        rows = [{"messages": turns}, {"conversations": spoken}, {"prompt": turns[:1], "completion": turns[1:]}]
        for row in rows:
            assert [own for _, own in trained_of(tmp_path, TURNS, row)] == [f"Half past six.{END}"]
    for wrong in ({"weight": 1}, {other: True for other in FLAGS if other != flag}, {flag: "no"}, {flag: []}):
        told = refusal(tmp_path, TURNS, {"messages": [ASK, first | {flag: False} | wrong]})
        assert "messages[1]: " in told and flag in told
    assert f"messages[0]: {flag}" in refusal(tmp_path, TURNS, {"messages": [ASK | {flag: True}, ANSWER]})
    pair = {"prompt": [ASK], "chosen": [ANSWER | {flag: False}], "rejected": [first]}
    assert "chosen[0].weight must be 1" in refusal(tmp_path, TURNS, pair)


@pytest.mark.parametrize("column", ["images", "videos", "audios"])
def test_rows_with_images_beside_their_text_are_refused_at_every_door(tmp_path: Path, column: str) -> None:
    media = {column: ["quay.png"]}
    asked = {"role": "user", "content": f"<{column[:-1]}>When?"}
    rows: list[dict[str, Any]] = [
        {"messages": [asked, ANSWER], **media},
        {"messages": [asked | media, ANSWER]},
        {"prompt": "<image>", "completion": "a", **media},
        {"instruction": "<image>", "output": "a", **media},
        {"conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "a"}], **media},
        {"prompt": "<image>", "chosen": "a", "rejected": "b", **media},
        {"text": "<image>", **media},
    ]
    for row in rows:
        assert f"{column}: only text can be trained on" in refusal(tmp_path, TURNS, row)
        (tmp_path / "rows" / "rows.jsonl").unlink()
        parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows" / "rows.parquet")
        with pytest.raises(InvalidInput, match="only text can be trained on"):
            trained(tmp_path / "rows", model_of(TURNS))
        (tmp_path / "rows" / "rows.parquet").unlink()
    for row in rows[:4]:
        with pytest.raises(InvalidInput, match="only text can be trained on"):
            list(open_prompts(folder_of(tmp_path, row), DatasetSource(uri="file:///rows")))
    assert trained_of(tmp_path, TURNS, {"messages": [ASK, ANSWER], column: []})


def test_a_refusal_is_the_answer(tmp_path: Path) -> None:
    told = "I may not say that."
    answers: list[dict[str, Any]] = [
        {"content": "", "refusal": told},
        {"content": None, "refusal": told},
        {"refusal": told},
        {"content": [{"type": "refusal", "refusal": told}]},
        {"content": told, "refusal": None},
    ]
    for answer in answers:
        turns = [ASK, {"role": "assistant", **answer}]
        assert [own for _, own in trained_of(tmp_path, TURNS, {"messages": turns})] == [told + END]
        [pair, _] = trained_of(tmp_path, TURNS, {"prompt": [ASK], "chosen": turns[1:], "rejected": [ANSWER]})
        assert pair[1] == told + END
    for wrong in (ANSWER | {"refusal": told}, {"role": "assistant", "content": "", "refusal": [told]}):
        assert "messages[1].refusal must be" in refusal(tmp_path, TURNS, {"messages": [ASK, wrong]})
    assert "messages[0].refusal must be" in refusal(tmp_path, TURNS, {"messages": [ASK | {"refusal": told}, ANSWER]})


def test_an_answer_of_nothing_is_warned_of(tmp_path: Path) -> None:
    nothing = {"role": "assistant", "content": ""}
    rows: list[dict[str, Any]] = [
        {"messages": [ASK, nothing]},
        {"prompt": "When?", "completion": ""},
        {"prompt": [ASK], "chosen": [ANSWER], "rejected": [nothing]},
    ]
    for row in rows:
        report = preview_of(folder_of(tmp_path, row), model_of(TURNS), PREVIEW).report
        assert "an answer of 1 row is empty" in report.warnings[0] and "rows.jsonl:1" in report.warnings[0]
    row = {"messages": [ASK, nothing | {"weight": 0}, ASK, CALLED | {"content": ""}, ASK, ANSWER]}
    assert not preview_of(folder_of(tmp_path, row), model_of(CALLING), PREVIEW).report.warnings


def test_a_model_with_a_template_for_tools_uses_it_where_a_row_has_some(tmp_path: Path) -> None:
    both = [{"name": "default", "template": TURNS}, {"name": "tool_use", "template": TOOLS_FIRST + TURNS}]
    plain, told = {"messages": [ASK, ANSWER]}, {"messages": [ASK, ANSWER], "tools": [TIDE]}
    (without, _), (text, own) = trained_of(tmp_path, both, plain, told)
    assert "<tools>" not in without and json.dumps(TIDE) in text and own == f"Half past six.{END}"
    [(_, asked)] = rendered(open_prompts(folder_of(tmp_path, told), DatasetSource(uri="file:///rows")), model_of(both))
    assert model_of(both).decode(asked) == text.removesuffix(f"{own}\n")


def test_templates_in_files_of_their_own_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """As `save_pretrained` writes them: before what tokenizer_config.json says, and tool_use beside the default."""
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json()),
        eos_token=END,
        chat_template={"default": TURNS, "tool_use": TOOLS_FIRST + TURNS, "rag": "never {{ asked }}"},
    ).save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": ONLY_TEXTS + "x"}))
    model, theirs = (
        TokenizerFiles(folder=tmp_path / "model", place="model").load(),
        PreTrainedTokenizerFast.from_pretrained(tmp_path / "model"),
    )
    rows = [{"messages": [ASK, ANSWER]}, {"messages": [ASK, ANSWER], "tools": [TIDE]}]
    for row, (text, _) in zip(rows, trained(folder_of(tmp_path, *rows), model), strict=True):
        assert text == theirs.apply_chat_template(row["messages"], row.get("tools"), tokenize=False)
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(InvalidInput, match="several chat templates and none is the default"):
        TokenizerFiles(folder=tmp_path / "model", place="model").load()


def test_what_a_template_leaves_out_is_refused_by_name(tmp_path: Path) -> None:
    named = {"role": "user", "content": "tide?"}
    for asked in (ASK, named):
        row = {"messages": [asked, ANSWER], "tools": [TIDE]}
        assert "rows.jsonl:1: tools" in refusal(tmp_path, TURNS, row)
    developer = {"role": "developer", "content": "Half"}  # stands in the answer
    template = TURNS.replace("in messages", "in messages if m.role != 'developer'")
    assert "messages[0]: the chat template leaves out" in refusal(
        tmp_path, template, {"messages": [developer, ASK, ANSWER]}
    )
    thoughtful = ANSWER | {"reasoning_content": "The moon says so."}
    assert "messages[1]: the chat template leaves out the thoughts" in refusal(
        tmp_path, TURNS, {"messages": [ASK, thoughtful]}
    )


def test_nulls_that_a_schema_adds_to_tools_are_not_shown(tmp_path: Path) -> None:
    rows = [{"messages": [ASK, ANSWER], "tools": [tool]} for tool in (TIDE, QUAY)]
    (tmp_path / "rows").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows" / "d.parquet")
    for (text, _), tool in zip(trained(tmp_path / "rows", model_of(WITH_TOOLS)), (TIDE, QUAY), strict=True):
        shown = json.loads(text.partition("<tools>")[2].partition("</tools>")[0])
        assert shown == tool


def test_marks_move_for_a_row_with_private_characters(tmp_path: Path) -> None:
    icons = ["\U000f024b docs", "\U000f0000\U000f0001\U000f0003", "\U0010fffd"]
    rows = [{"messages": [ASK, ANSWER | {"content": icon}]} for icon in icons]
    assert [own for _, own in trained_of(tmp_path, TURNS, *rows)] == [f"{icon}{END}" for icon in icons]
    assert [own for _, own in trained_of(tmp_path, TEMPLATES["blocks"][0], *rows)] == [f"{icon}{END}" for icon in icons]


def test_an_answer_may_end_with_its_thoughts_and_line_breaks(tmp_path: Path) -> None:
    said = ANSWER | {"content": "<think>\nhm\n</think>\n\n"}
    [(_, own)] = trained_of(tmp_path, QWEN, {"messages": [ASK, said]})
    assert own == f"<think>\nhm\n</think>\n\n{END}"


def test_a_header_that_no_prompt_writes_is_the_models_to_write(tmp_path: Path) -> None:
    """Llama 3 without a generation prompt: whoever asks such a model gives it no header."""
    template = LLAMA.partition("{%- if add_generation_prompt")[0]
    for content in ("12 sacks.", " 12 sacks.", "\n12 sacks."):
        [(_, own)] = trained_of(tmp_path, template, {"messages": [ASK, ANSWER | {"content": content}]})
        assert own == "<|start_header_id|>assistant<|end_header_id|>\n\n12 sacks.<|eot_id|>"


def test_texts_keep_one_beginning_and_one_end(tmp_path: Path) -> None:
    described = json.loads(tokenizer_json())
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [SPECIAL.index("<s>")], "tokens": ["<s>"]}},
    }
    files = {"tokenizer.json": json.dumps(described).encode(), "tokenizer_config.json": b'{"eos_token": "</s>"}'}
    model = ModelTokenizer(files, "model")
    body = "How many sacks? Twelve."
    for text in (body, f"<s>{body}", f"{body}</s>", f"<s>{body}</s>"):
        [(whole, own)] = trained(folder_of(tmp_path, {"text": text}), model)
        assert whole == f"<s>{body}</s>" and own == f"{body}</s>"
        row = {"prompt": text.partition("Twelve")[0], "completion": "Twelve" + text.partition("Twelve")[2]}
        [(whole, own)] = trained(folder_of(tmp_path, row), model)
        assert whole == f"<s>{body}</s>" and own == "Twelve.</s>"
        [(_, ids)] = rendered(open_prompts(tmp_path / "rows", DatasetSource(uri="file:///rows")), model)
        assert model.decode(ids) == "<s>How many sacks? "


ALPACA = {"instruction": "And on the next quay?", "input": "", "output": "Eleven sacks."}
TOLD = {"system": "Be terse.", "history": [["How many sacks on quay 7?", "Ten sacks."]]}
NEXT = [{"role": "user", "content": ALPACA["instruction"]}, {"role": "assistant", "content": ALPACA["output"]}]


@pytest.mark.parametrize(
    "row",
    [
        ALPACA,
        {"messages": NEXT},
        {"messages": [{"role": "system", "content": "Be terse."}, *NEXT]},
        {"conversations": [{"from": "human", "value": NEXT[0]["content"]}, {"from": "gpt", "value": "Eleven sacks."}]},
        {"prompt": NEXT[0]["content"], "completion": "Eleven sacks."},
        {"prompt": NEXT[:1], "completion": NEXT[1:]},
        {"prompt": NEXT[0]["content"], "chosen": "Eleven sacks.", "rejected": "No."},
        {"prompt": NEXT[:1], "chosen": NEXT[1], "rejected": "No."},
        {"chosen": NEXT, "rejected": [NEXT[0], {"role": "assistant", "content": "No."}]},
    ],
)
def test_system_and_history_are_earlier_turns_in_every_format(tmp_path: Path, row: dict[str, Any]) -> None:
    said = [
        ("system", "Be terse."), ("user", "How many sacks on quay 7?"), ("assistant", "Ten sacks."),
        ("user", "And on the next quay?"), ("assistant", "Eleven sacks."),
    ]  # fmt: skip
    text, own = trained_of(tmp_path, TURNS, row | TOLD)[0]
    assert text == "".join(f"<|im_start|>{role}\n{content}{END}\n" for role, content in said)
    assert own == ("" if "chosen" in row else f"Ten sacks.{END}") + f"Eleven sacks.{END}"
    if "chosen" not in row:
        source = DatasetSource(uri="file:///rows")
        [(_, ids)] = rendered(open_prompts(tmp_path / "rows", source), model_of(TURNS))
        assert model_of(TURNS).decode(ids) == text.removesuffix(f"Eleven sacks.{END}\n")


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"prompt": "p", "completion": "c", "label": False}, "label is false"),
        ({"prompt": "p", "completion": "c", "label": 0}, "label is false"),
        ({"messages": [ASK, ANSWER], "input": "x"}, "input says what the prompt or the mask is"),
        ({"messages": [ASK, ANSWER], "loss_mask": [0, 1]}, "loss_mask says what"),
        ({"prompt": "p", "completion": "c", "completion_mask": [0, 1]}, "completion_mask says what"),
        ({"text": "t", "attention_mask": [1]}, "attention_mask says what"),
        ({"text": "t", "system": "s"}, "system says what"),
        ({"messages": [{"role": "system", "content": "a"}, ASK, ANSWER], "system": "b"}, "system is another text"),
        ({"messages": [ASK, ANSWER], "history": [["q"]]}, "history must be a list of pairs"),
        ({"messages": [ASK, ANSWER], "tools": [TIDE], "functions": [TIDE]}, "functions is the older name of tools"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "loss_mask must have a 0 or 1 for each of the 3"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "attention_mask has zeros between"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_that_say_what_is_trained_are_never_ignored(
    tmp_path: Path, row: dict[str, Any], rule: str, kind: str
) -> None:
    folder = folder_of(tmp_path, row)
    if kind == "parquet":
        (folder / "rows.jsonl").unlink()
        parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "d.parquet")
    with pytest.raises(InvalidInput, match=rule):
        trained(folder, model_of(TURNS))


def test_masks_of_tokenized_rows_are_kept_and_padding_is_not(tmp_path: Path) -> None:
    ids = [9, 10, 11, 12]
    for masks, expected in (
        ({"completion_mask": [0, 0, 1, 1]}, ([9, 10, 11, 12], [-100, -100, 11, 12])),
        ({"loss_mask": [0, 1, 1, 1], "completion_mask": [0, 0, 1, 1]}, ([9, 10, 11, 12], [-100, -100, 11, 12])),
        ({"attention_mask": [0, 1, 1, 0], "loss_mask": [1, 0, 1, 1]}, ([10, 11], [-100, 11])),
    ):
        [row] = open_dataset(folder_of(tmp_path, {"input_ids": ids, **masks}), DatasetSource(uri="file:///rows"))
        assert (row.input_ids.tolist(), row.labels.tolist()) == expected


def test_columns_that_nobody_reads_are_named(tmp_path: Path) -> None:
    rows = [{"messages": [ASK, ANSWER], "id": 7, "label": True}, {"messages": [ASK, ANSWER], "source": "quay"}]
    folder = folder_of(tmp_path, *rows)
    for kind in ("jsonl", "parquet"):
        if kind == "parquet":
            (folder / "rows.jsonl").unlink()
            parquet.write_table(pyarrow.Table.from_pylist([rows[0] | rows[1]]), folder / "d.parquet")
        dataset = open_dataset(folder, DatasetSource(uri="file:///rows"))
        tally = Tally("chat", 100, dataset.unread)
        list(dataset)
        assert not dataset.unread.keys
        assert tally.report().warnings == ("nobody reads the columns 'id', 'source'",)
    dataset = open_dataset(
        folder_of(tmp_path / "other", rows[0] | {"label": "harbour"}), DatasetSource(uri="file:///r")
    )
    list(dataset)
    assert dataset.unread.columns == {"id", "label"}


def test_keys_of_messages_that_nobody_reads_are_named_with_the_rows_that_have_them(tmp_path: Path) -> None:
    """But for those that the chat template names, and those of every message."""
    whole = ANSWER | {"reasoning_content": "Tides.", "name": "clerk", "tool_call_id": "1", "weight": 1}
    rows = [
        {"messages": [ASK | {"foo": 1, "seen": 2}, ANSWER | {"bar": [], "foo": "x", "refusal": None}]},
        {"messages": [ASK, whole, ASK | {"foo": 1}, ANSWER]},
    ]
    dataset = open_dataset(folder_of(tmp_path, *rows), DatasetSource(uri="file:///rows"))
    list(dataset)
    tally = Tally("chat", 100, dataset.unread, model_of(TURNS + "{{ messages[0].seen }}").template)
    assert [w for w in tally.report().warnings if "keys" in w] == [
        "nobody reads the keys 'bar', 'foo' of messages (in rows: 1, 2)"
    ]


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_keys_of_prompts_messages_that_nobody_reads_are_named_too(tmp_path: Path, column: str) -> None:
    """In the report of a run's prompts and in a preview, but for those that the chat template names."""
    folder = folder_of(tmp_path, {column: [ASK | {"foo": 1, "seen": 2}]}, {column: [ASK | {"foo": "x"}]})
    model, source = model_of(TURNS + "{{ messages[0].seen }}"), DatasetSource(uri="file:///rows")
    opened = open_prompts(folder, source)
    prompts = PromptTally(opened, 1000, model.template)
    for question, ids in rendered(opened, model):
        prompts.count(question, ids)
    told = ("nobody reads the keys 'foo' of messages (in rows: 2)",)
    assert prompts.report().warnings == told
    preview = preview_of(folder, model, PreviewRequest(source=source, model_uri="m", are_prompts=True))
    assert preview.report.warnings == told


REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + TURNS


@pytest.mark.parametrize("kind", ["chat", "pairs", "prompts"])
def test_rows_at_which_a_template_raises_are_lost_rows(tmp_path: Path, kind: str) -> None:
    """Wherever they stand, so that whole batches may be lost. They are counted and named, up to max_lost_fraction."""
    system = {"role": "system", "content": "Be brief."}

    def row(number: int) -> dict[str, Any]:
        asked = [system, ASK] if number < 20 or number == 40 else [ASK]
        return (
            {"prompt": asked, "chosen": [ANSWER], "rejected": [CALLED | {"content": "?", "tool_calls": None}]}
            if (kind == "pairs")
            else {"messages": [*asked, ANSWER]}
        )

    folder = folder_of(tmp_path, *map(row, range(100)))
    fields = {
        "dataset": Artifact(uri="file:///d", sha256="0" * 64),
        "model": Artifact(uri="file:///m", sha256="0" * 64),
    }
    source, model = DatasetSource(uri="file:///rows"), model_of(REFUSES)

    def report(most: float) -> Any:
        (place := tmp_path / f"{most}").mkdir()
        if kind == "prompts":
            asked = PromptsRequest(**fields, source=source, max_prompt_tokens=99, max_lost_fraction=most)
            return write_prompts(folder, model, asked, place)
        asked = TokenizeRequest(**fields, source=source, max_tokens=99, max_lost_fraction=most, pairs=kind == "pairs")
        return write_units(folder, model, asked, place)

    found = report(0.21)
    assert (found.num_rows, found.num_refused) == (100, 21)
    assert (found.num_prompts if kind == "prompts" else found.num_kept) == 79
    assert [lost.place for lost in found.lost] == [f"rows.jsonl:{number}" for number in range(1, 21)]
    assert all("no system turns" in lost.reason for lost in found.lost)
    with pytest.raises(InvalidInput, match=r"21 of 100 .*template.*first: rows.jsonl:1 .*no system turns"):
        report(0.2)
    shown = PreviewRequest(source=source, model_uri="m", max_lost_fraction=0.2, are_prompts=kind == "prompts")
    preview = preview_of(folder, model, shown)
    assert preview.report.num_refused == preview.report.num_lost == 21
    assert "no system turns" in str(preview.problem)


def test_thoughts_that_a_template_cuts_are_counted(tmp_path: Path) -> None:
    thoughtful = ANSWER | {"reasoning_content": "The moon says so."}
    row = {"messages": [ASK, thoughtful, ASK, thoughtful]}
    [batch] = encoded(open_dataset(folder_of(tmp_path, row, row), DatasetSource(uri="file:///rows")), model_of(QWEN))
    tally = Tally("chat", 100)
    tally.add_warnings_of(batch.control_tokens, batch.dropped_reasoning)
    told = "the chat template leaves the thoughts of earlier turns out of 2 rows; first: rows.jsonl:1"
    assert tally.report().warnings == (told,)
    opened = open_prompts(folder_of(tmp_path, row), DatasetSource(uri="file:///rows"))
    prompts = PromptTally(opened, 1000)
    for question, ids in rendered(opened, model_of(QWEN)):
        prompts.count(question, ids)
    assert prompts.report().warnings == (told.replace("2 rows", "1 row"),)


def test_sharegpts_calls_are_calls(tmp_path: Path) -> None:
    turns = [
        ("human", "When?"), ("function_call", '{"name": "tide", "arguments": {"port": "Kiel"}}'),
        ("observation", "06:30"), ("gpt", "Half past six."),
    ]  # fmt: skip
    row = {"conversations": [{"from": role, "value": value} for role, value in turns], "tools": json.dumps([TIDE])}
    same = {"messages": [ASK, CALLED, {"role": "tool", "content": "06:30"}, ANSWER], "tools": [TIDE]}
    assert trained_of(tmp_path, QWEN, row) == trained_of(tmp_path, QWEN, same)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    folder_of(tmp_path)
    (tmp_path / "rows" / "rows.jsonl").write_text('{"text": "a", "more": {"b": 1, "b": 2}}\n')
    with pytest.raises(InvalidInput, match=r"rows.jsonl:1: .* has the key 'b' twice"):
        trained(tmp_path / "rows", model_of(None))


# The same rows at every door.


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Any:
    prompts = ChatPrompts(HostContext(Settings(root=tmp_path_factory.mktemp("root"))))
    yield prompts
    prompts.close()


SPOKEN: list[dict[str, Any]] = [
    {"messages": [ASK, ANSWER]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "When?"}]}, ANSWER]},
    {
        "messages": [ASK, CALLED, {"role": "tool", "tool_call_id": "call_1", "content": "06:30"}, ANSWER],
        "tools": [TIDE],
    },
    {
        "messages": [
            ASK,
            {"role": "assistant", "function_call": CALL["function"]},
            {"role": "function", "name": "tide", "content": "06:30"},
            ANSWER,
        ],
        "functions": [TIDE["function"]],
    },
    {"messages": [{"role": "system", "content": "Be terse."}, ASK, ANSWER, ASK, ANSWER], "tools": json.dumps([TIDE])},
    *({"messages": [ASK, ANSWER], "tools": [tool]} for tool in OTHER_TOOLS),
]


@pytest.mark.parametrize("row", SPOKEN)
def test_the_same_row_is_the_same_tokens_at_every_door(tmp_path: Path, chats: ChatPrompts, row: dict[str, Any]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text(tokenizer_json())
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": QWEN, "eos_token": END}))
    artifact = Artifact(uri=(tmp_path / "model").as_uri(), sha256=seal(tmp_path / "model"))
    model = open_model(tmp_path / "model")
    *asked, answer = row["messages"]
    tools = {name: row[name] for name in ("tools", "functions") if name in row}

    def ids_of(fields: dict[str, Any]) -> list[list[int]]:
        source = DatasetSource(uri="file:///rows", assistant_turns="last" if "messages" in fields else "all")
        [batch] = encoded(open_dataset(folder_of(tmp_path, fields), source), model)
        block = batch.block
        return [block.id_T[a : a + n].tolist() for a, n in zip(block.start_R, block.num_tokens_R, strict=True)]

    [sft] = ids_of(row)
    if row.get("tools") in [[tool] for tool in OTHER_TOOLS]:
        assert [sft] == ids_of(row | {"tools": [TIDE]}), "whatever API's form the tool has"
    pair = {"prompt": asked, "chosen": [answer], "rejected": [answer | {"content": "No."}]} | tools
    assert ids_of(pair)[0] == sft

    source = DatasetSource(uri="file:///rows")
    [(_, prompt)] = rendered(open_prompts(folder_of(tmp_path, row), source), model)
    own = model.tokens_of(f"<think>\n\n</think>\n\n{answer['content']}{END}")
    assert sft == [*prompt, *own, *model.tokens_of("\n")]

    openai = Row("chat", dict(row))  # OpenAI's protocol has tools as a list alone
    sent = row["tools"] if isinstance(row.get("tools"), list) else tools_of(openai)
    assert list(chats.prompt(artifact, asked, tools_of(openai) or []).ids) == prompt

    logprobs = {"content": [{"token": f"token_id:{token_id}", "logprob": -1.0} for token_id in own]}
    sampled = [*asked, answer | {"logprobs": logprobs}]
    trajectory = ChatTrajectory.model_validate({"messages": sampled, "tools": sent, "reward": 1.0})
    files = TokenizerFiles(folder=tmp_path / "model", place=artifact.uri)
    with Conversations(artifact, files) as conversations:
        [one] = conversations.trajectories_of(trajectory, 10_000)
    assert list(one.token_ids) == [*prompt, *own]


def test_what_is_left_out_is_refused_at_every_door(tmp_path: Path, chats: ChatPrompts) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text(tokenizer_json())
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": END}))
    artifact = Artifact(uri=(tmp_path / "model").as_uri(), sha256=seal(tmp_path / "model"))
    row = {"messages": [ASK, ANSWER], "tools": [TIDE]}
    assert "tools[0]" in refusal(tmp_path, CHATML, row)
    assert "tools[0]" in refusal(
        tmp_path,
        CHATML,
        {"prompt": [ASK], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "x"}], "tools": [TIDE]},
    )
    with pytest.raises(InvalidInput, match=r"tools\[0\]"):
        list(rendered(open_prompts(folder_of(tmp_path, row), DatasetSource(uri="file:///rows")), model_of(CHATML)))
    with pytest.raises(InvalidInput, match=r"tools\[0\]"):
        chats.prompt(artifact, [ASK], [TIDE])
    said = {"content": [{"token": "token_id:1", "logprob": -1.0}]}
    sent = {"messages": [ASK, ANSWER | {"logprobs": said}], "tools": [TIDE], "reward": 1.0}
    files = TokenizerFiles(folder=tmp_path / "model", place=artifact.uri)
    with Conversations(artifact, files) as reader, pytest.raises(BrokenTrajectory) as broken:
        reader.trajectories_of(ChatTrajectory.model_validate(sent), 100)
    assert "tools[0]" in broken.value.message


# The rule, over conversations of every kind.

WORDS = st.text("abcxyz 12.\n{}\"'<é船\U000f0002", min_size=1, max_size=12).map(lambda text: f"w{text}w")
ARGUMENTS = st.dictionaries(st.sampled_from(("port", "day", "é")), WORDS | st.integers(-9, 9), max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> dict[str, Any]:
    """A row in one of OpenAI's forms, each of whose texts is unlike all others."""
    number = iter(range(1000))

    def text() -> Any:
        one = f"{draw(WORDS)} #{next(number)}."
        return draw(st.sampled_from((one, [{"type": "text", "text": one}])))

    messages = [{"role": draw(st.sampled_from(("system", "developer"))), "content": text()}] * draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": text()})
        if draw(st.booleans()):
            written = json.dumps(draw(ARGUMENTS), ensure_ascii=draw(st.booleans()))
            call = {"id": "callnr001", "type": "function", "function": {"name": "tide", "arguments": written}}
            said = {} if draw(st.booleans()) else {"content": draw(st.sampled_from((None, "")))}
            messages += [{"role": "assistant", "tool_calls": [call], **said}, {"role": "tool", "content": text()}]
        thought = draw(st.sampled_from(({}, {"reasoning_content": f"thought #{next(number)}."})))
        messages.append({"role": "assistant", "content": text(), **thought})
    return {"messages": messages, "tools": draw(st.sampled_from((None, [TIDE], [TIDE["function"], QUAY])))}


COMPILED = {
    name: ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, SPECIAL)
    for name, source in {
        "turns": TURNS, "calling": CALLING, "content": NEEDS_CONTENT, "text": NEEDS_TEXT, "tools": WITH_TOOLS,
        "llama": LLAMA, "qwen": QWEN, "blocks": TEMPLATES["blocks"][0],
    }.items()
}  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(row=conversations(), name=st.sampled_from(sorted(COMPILED)))
def test_all_that_a_row_says_stands_in_its_text_or_is_refused_or_counted(row: dict[str, Any], name: str) -> None:
    check_rule(COMPILED[name], row)


def check_rule(template: ChatTemplate, row: dict[str, Any]) -> None:
    read = Row("row", row)
    messages, tools = messages_of(read, "messages"), tools_of(read)
    try:
        found = template.spans(messages, tools, [float(m["role"] == "assistant") for m in messages])
    except Unrendered:
        return
    whole = found.text + json.dumps(found.text)  # JSON's own way to write it counts
    hidden = 0
    for message in row["messages"]:
        content = message.get("content") or ""
        content = content if isinstance(content, str) else content[0]["text"]
        assert said_in(whole, content.strip())
        hidden += "reasoning_content" in message and message["reasoning_content"] not in whole
        for call in message.get("tool_calls") or ():
            assert "tide" in whole
            for key, value in json.loads(call["function"]["arguments"]).items():
                assert key in whole and said_in(whole, str(value))
    assert all((tool.get("function") or tool)["name"] in whole for tool in row["tools"] or ())
    assert hidden == found.dropped_reasoning
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    asked = template.asked(messages[:last], tools).text
    own = found.text[found.spans[-1].start :]
    assert found.text[: len(asked)] == asked and found.text[len(asked) :] == own


def said_in(text: str, part: str) -> bool:
    return part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text or json.dumps(part)[1:-1] in text
