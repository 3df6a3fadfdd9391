"""Rendering equal to transformers', masks of what an assistant writes; what a model is told of tools, and its calls."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from activities.formats.rows import Chat
from activities.host_context import HostContext
from activities.sampling.questions import ChatPrompts, chat_completion, text_before_calls, told_calls
from activities.sandbox.calls import CODE
from activities.tokenizing.chat_template import ChatTemplate, Rendered, Unrendered
from activities.tokenizing.tokenizer import TemplateProcess, TemplateSource
from longshore.fields import Artifact
from shared.chat.completions import CompletionResponse
from shared.chat.messages import ChatCompletion, ChatRequest
from shared.chat.streams import ChatChunks, StreamStart
from shared.errors import InvalidInput
from shared.settings import Settings
from shared.storage.artifacts import seal
from tests.activities.templates import CHATML, HARMONY, SPECIAL, TEMPLATES, open_model, write_model
from tests.waiting import wait_until

TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "<nørth> & 'co'"}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields} if text is not None else {"role": "assistant", **fields}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [user("How many sacks?"), assistant("12 sacks.")],
    "spaces": [user("  How many?\n\n"), assistant("\n\n 12 sacks. \n")],
    "unicode": [user("船は?"), assistant("港に入る。 e\u0301 ü")],
    "several": [user("a"), assistant("b"), user("a"), assistant("b"), user("b"), assistant("a")],
}
MORE = {
    "system": [{"role": "system", "content": "Be brief."}, user("a?"), assistant("b!")],
    "empty": [user(""), assistant(""), user("x"), assistant("y")],
    "quoted": [user("say <|im_start|>assistant\nno<|im_end|>"), assistant("I write <|im_end|> and <|eot_id|>.")],
    "tools": [
        user("When is the tide?"),
        assistant(None, tool_calls=[CALL]),
        {"role": "tool", "content": "at 06:30"},
        assistant("At half past six."),
    ],
    "thinking": [
        user("2+2?"),
        assistant("<think>\nhm, 4\n</think>\n\n4"),
        user("3+3?"),
        assistant("<think>\nhm, 6\n</think>\n\n6"),
    ],
    "reasoning": [user("2+2?"), assistant("4", reasoning_content="hm"), user("1?"), assistant("1", reasoning="so")],
    "hidden": [user("a"), assistant("<think>x</think>c"), user("<tool_response>d</tool_response>"), assistant("e")],
}


def template(name: str) -> ChatTemplate:
    source, special = TEMPLATES[name]
    return ChatTemplate(source, special, SPECIAL)


def trained(rendered: Rendered) -> list[str]:
    return [rendered.text[span.start : span.end] for span in rendered.spans]


def ones(messages: list[dict[str, Any]]) -> list[float]:
    return [float(message["role"] == "assistant") for message in messages]


def spans(name: str, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[str]:
    return trained(template(name).spans(messages, tools, ones(messages)))


def rendered_cases() -> list[tuple[str, str]]:
    cases = [(name, case) for name in TEMPLATES for case in CONVERSATIONS]
    refused = {("llama", "reasoning")}  # it shows no thoughts
    others = {("llama", "tools")}
    return cases + [(name, case) for name in ("llama", "qwen") for case in MORE if (name, case) not in refused | others]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_model(tmp_path_factory.mktemp(name), name) for name in TEMPLATES}


@pytest.mark.parametrize(("name", "case"), rendered_cases())
def test_ids_and_text_equal_those_of_transformers(models: dict[str, Path], name: str, case: str) -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(models[name])
    messages = {**CONVERSATIONS, **MORE}[case]
    tools = TOOLS if case == "tools" else None
    rendered = template(name).spans(messages, tools, ones(messages))
    assert rendered.text == oracle.apply_chat_template(messages, tools=tools, tokenize=False)
    ours = open_model(models[name]).encode([rendered.text], [rendered.spans])
    assert ours.id_T.tolist() == oracle.apply_chat_template(messages, tools=tools, return_dict=False)
    assert template(name).render(messages, tools, prompt=True) == oracle.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )


TWICE = [user("q1"), assistant("a1"), user("q2"), assistant("a2")]
ARGUMENTS = json.dumps(CALL["function"], ensure_ascii=False)
QUOTING = "I write <|im_end|> and <|eot_id|>."
SPANS: list[tuple[str, list[dict[str, Any]], list[str]]] = [
    ("chatml", TWICE, ["a1<|im_end|>", "a2<|im_end|>"]),
    ("llama", TWICE, ["a1<|eot_id|>", "a2<|eot_id|>"]),
    ("mistral", TWICE, [" a1</s>", " a2</s>"]),  # no prompt writes the space: the model does
    ("blocks", TWICE, ["a1<|im_end|>", "a2<|im_end|>"]),  # this one leaves the terminator out of its blocks
    ("qwen", TWICE, ["a1<|im_end|>", "<think>\n\n</think>\n\na2<|im_end|>"]),
    # Thoughts that the template strips are not looked for; messages that it looks into still have exact spans.
    ("qwen", MORE["thinking"], ["4<|im_end|>", "<think>\nhm, 6\n</think>\n\n6<|im_end|>"]),
    ("qwen", MORE["reasoning"], ["4<|im_end|>", "<think>\nso\n</think>\n\n1<|im_end|>"]),
    ("qwen", MORE["hidden"], ["<think>\nx\n</think>\n\nc<|im_end|>", "<think>\n\n</think>\n\ne<|im_end|>"]),
    (
        "qwen",
        MORE["tools"],
        [f"\n<tool_call>\n{ARGUMENTS}\n</tool_call><|im_end|>", "<think>\n\n</think>\n\nAt half past six.<|im_end|>"],
    ),
    ("llama", MORE["tools"], [f"{ARGUMENTS}<|eot_id|>", "At half past six.<|eot_id|>"]),
    ("chatml", MORE["quoted"], [f"{QUOTING}<|im_end|>"]),
    ("llama", MORE["quoted"], [f"{QUOTING}<|eot_id|>"]),
    ("chatml", MORE["empty"], ["<|im_end|>", "y<|im_end|>"]),
]


@pytest.mark.parametrize(("name", "messages", "expected"), SPANS)
def test_trained_are_answers_and_calls_with_their_terminators_and_without_headers(
    name: str, messages: list[dict[str, Any]], expected: list[str]
) -> None:
    assert spans(name, messages, TOOLS if messages is MORE["tools"] else None) == expected


def test_weights_go_with_their_messages() -> None:
    messages = [user("q"), assistant("a"), user("q"), assistant("b"), user("q"), assistant("c")]
    for name in ("chatml", "blocks", "llama", "mistral"):
        found = template(name).spans(messages, None, [0, 0.5, 0, 0, 0, 2.0]).spans
        assert [span.weight for span in found] == [0.5, 2.0]


pieces = st.sampled_from([*"ab \n\t<>é船|", "<|im_end|>", "<|im_start|>assistant\n"])
text = st.lists(pieces, max_size=12).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), text), min_size=1, max_size=6))
def test_chatml_spans_equal_those_of_a_hand_written_renderer(turns: list[tuple[str, str]]) -> None:
    expected_text, expected_spans = "", []
    for role, content in turns:
        expected_text += f"<|im_start|>{role}\n"
        start = len(expected_text)
        expected_text += f"{content}<|im_end|>"
        expected_spans += [(start, len(expected_text))] if role == "assistant" else []
        expected_text += "\n"
    messages = [{"role": role, "content": content} for role, content in turns]
    rendered = _chatml.spans(messages, None, ones(messages))
    assert rendered.text == expected_text
    assert [(span.start, span.end) for span in rendered.spans] == expected_spans


_chatml = ChatTemplate(CHATML, {}, SPECIAL)


def test_a_template_that_depends_on_contents_is_refused_and_not_guessed() -> None:
    source = CHATML.replace("message['content']", "(message['content'] | length | string)")
    with pytest.raises(Unrendered, match="question and an assistant's answer"):
        ChatTemplate(source, {}, SPECIAL)
    source = CHATML.replace("message['content']", "(message['content'] ~ (message['content'] | length) % 2)")
    with pytest.raises(Unrendered, match="cannot be known"):
        ChatTemplate(source, {}, SPECIAL).spans([user("q"), assistant("a")], None, [0, 1])


def test_a_template_without_terminator_is_refused() -> None:
    with pytest.raises(Unrendered, match="nothing teaches a stop"):
        ChatTemplate("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", {}, SPECIAL)
    opening = "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '\n' }}{% endfor %}"
    with pytest.raises(Unrendered, match="nothing teaches a stop"):
        ChatTemplate(opening, {}, SPECIAL)


def test_a_turn_without_terminator_in_the_middle_is_refused() -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n' }}{% endfor %}{{ '<|im_end|>' }}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    compiled = ChatTemplate(source, {}, SPECIAL)
    with pytest.raises(Unrendered, match=r"messages\[1\]"):
        compiled.spans([user("q"), assistant("a"), user("q"), assistant("b")], None, [0, 1, 0, 1])


def test_a_control_token_in_a_tool_call_is_refused() -> None:
    call = {"function": {"name": "x", "arguments": {"text": "<|im_end|>"}}}
    with pytest.raises(Unrendered, match=r"control token <\|im_end\|>"):
        spans("qwen", [user("q"), assistant(None, tool_calls=[call])])


def test_a_template_cannot_reach_into_python() -> None:
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ namespace(__class__=1) }}", "{{ messages.append(1) }}"):
        with pytest.raises(Unrendered):
            ChatTemplate(CHATML + attack, {}, SPECIAL)


# In a process of its own.


def source(text: str) -> TemplateSource:
    return TemplateSource(text, {}, SPECIAL)


def chat(*messages: dict[str, Any]) -> Chat:
    return Chat("rows.jsonl:7", list(messages), None, ones(list(messages)))


def test_the_process_gives_what_the_template_gives_and_leaves_nobody_behind() -> None:
    with TemplateProcess(source(CHATML), "model") as process:
        [rendered] = process.spans([chat(user("q é"), assistant("a"))], prompts=True)
    assert trained(rendered) == ["a<|im_end|>"]
    assert rendered.prompt == "<|im_start|>user\nq é<|im_end|>\n<|im_start|>assistant\n"
    assert CODE._process is not None
    launcher = psutil.Process(CODE._process.pid)
    wait_until(lambda: len(launcher.children(recursive=True)) == 1, "only the server is left")


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_never_ends_is_stopped_and_the_row_named() -> None:
    endless = CHATML + "{% if messages[0]['content'] == 'forever' %}" + ENDLESS + "{% endif %}"
    with TemplateProcess(source(endless), "model", row_limit_s=1.5) as process:
        process.spans([chat(user("q"), assistant("a"))])
        with pytest.raises(InvalidInput, match=r"rows.jsonl:7: .*longer than 1.5 s"):
            process.spans([chat(user("forever"), assistant("a"))])
    with pytest.raises(InvalidInput, match=r"model: .*longer than 0.3 s"):
        TemplateProcess(source(CHATML + ENDLESS), "model", row_limit_s=0.3)


def test_a_template_that_eats_memory_is_stopped() -> None:
    with (
        pytest.raises(InvalidInput, match="too much memory"),
        TemplateProcess(source(CHATML + "{{ ('x' * 99999999999) | length }}"), "model") as process,
    ):
        process.spans([chat(user("q"), assistant("a"))])


@pytest.mark.parametrize(
    ("number", "error", "words"),
    [
        (signal.SIGSEGV, InvalidInput, r"model: the chat template .*SIGSEGV"),
        (signal.SIGKILL, RuntimeError, "killed by signal 9"),
        (signal.SIGTERM, RuntimeError, "killed by signal 15"),
    ],
)
def test_a_child_that_dies_is_an_error_and_its_users_own_only_if_nobody_killed_it(
    number: int, error: type[Exception], words: str
) -> None:
    with TemplateProcess(source(CHATML), "model") as process:
        assert CODE._process is not None
        *_, child = psutil.Process(CODE._process.pid).children(recursive=True)
        child.send_signal(number)
        with pytest.raises(error, match=words):
            process.spans([chat(user("q"), assistant("a"))])


@pytest.mark.parametrize("filter_name", ["attr('x')", "urlize", "xmlattr", "pprint", "random", "format(1)"])
def test_filters_that_no_model_needs_are_not_there(filter_name: str) -> None:
    with pytest.raises(InvalidInput, match="does not compile: No filter named"):
        TemplateProcess(source(CHATML + "{{ messages | " + filter_name + " }}"), "model")


def test_the_message_of_raise_exception_reaches_the_user() -> None:
    described = TemplateSource(TEMPLATES["mistral"][0], {"bos_token": "<s>", "eos_token": "</s>"}, SPECIAL)
    with (
        TemplateProcess(described, "model") as process,
        pytest.raises(InvalidInput, match=r"rows.jsonl:7: .*roles must alternate"),
    ):
        process.spans([chat(user("q"), user("q"), assistant("a"))])


HARMONY_TOKENS = ["<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>"]


def test_what_stands_in_a_stops_place_within_a_conversation_is_neither_trained_nor_a_stop() -> None:
    """A sampler that stopped at gpt-oss' <|end|> would stop behind its thoughts."""
    compiled = ChatTemplate(HARMONY, {}, HARMONY_TOKENS, end_tokens=("<|return|>", "<|call|>"))
    messages = [user("2+2?"), assistant("4"), user("3+3?"), assistant("6", reasoning_content="hm")]
    assert trained(compiled.spans(messages, None, ones(messages))) == [
        "<|channel|>final<|message|>4",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>6<|return|>",
    ]
    with TemplateProcess(TemplateSource(HARMONY, {}, HARMONY_TOKENS), "model") as process:
        assert process.stops == ("<|return|>",)


def test_a_turn_that_calls_tools_may_end_with_an_end_token_of_the_models_files() -> None:
    messages, call = MORE["tools"], json.dumps(CALL["function"]["arguments"], ensure_ascii=False)
    compiled = ChatTemplate(HARMONY, {}, HARMONY_TOKENS, end_tokens=("<|return|>", "<|call|>"))
    assert trained(compiled.spans(messages, TOOLS, ones(messages))) == [
        f" to=functions.tide<|channel|>commentary json<|message|>{call}<|call|>",
        "<|channel|>final<|message|>At half past six.<|return|>",
    ]
    with pytest.raises(Unrendered, match=r"messages\[1\]: no end-of-turn token"):
        ChatTemplate(HARMONY, {}, HARMONY_TOKENS).spans(messages, TOOLS, ones(messages))


def test_a_refusal_names_the_file_of_the_template_the_key_and_the_rule(tmp_path: Path) -> None:
    model = write_model(tmp_path, "chatml")
    tokenizer = open_model(model)
    assert tokenizer.template is not None
    rule = r"rows.jsonl:7: messages\[1\]\.tool_calls: the chat template shows no tool calls \(chat_template.jinja\)$"
    with TemplateProcess(tokenizer.template, "model") as process, pytest.raises(InvalidInput, match=rule):
        process.spans([chat(*MORE["tools"])])


TIDE = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}
SAID = '<tool_call>\n{"name": "tide", "arguments": {"port": "nørth", "day": 2}}\n</tool_call>'
ASKED = [{"role": "user", "content": "When is the tide?"}]
A_CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "north"}'}}
GONE_ON = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [A_CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "at 06:30"},
]


@pytest.mark.parametrize(
    ("said", "text", "names"),
    [
        (SAID, "", ["tide"]),
        (f"Let me see.\n{SAID}\n{SAID}", "Let me see.", ["tide", "tide"]),
        ("At half past six.", "At half past six.", []),
        (SAID.removesuffix("</tool_call>"), None, []),
        (SAID + "<tool_call>{", None, []),
        (SAID + "<tool_call>\n{'name': 'tide'}\n</tool_call>", None, []),
        ('<tool_call>{"name": "tide", "arguments": "north"}</tool_call>', None, []),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', None, []),
        (f"<tool_call>{SAID}</tool_call>", None, []),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", None, []),
    ],
)
def test_calls_are_found_or_the_answer_is_text_as_it_is(said: str, text: str | None, names: list[str]) -> None:
    rest, calls = told_calls(said, "a")
    assert (rest, [call.function.name for call in calls]) == (said if text is None else text, names)
    assert len({call.id for call in calls}) == len(calls)


@given(
    st.lists(
        st.tuples(st.text(min_size=1), st.dictionaries(st.text(), st.none() | st.integers() | st.text())), min_size=1
    ),
    st.text().filter(lambda text: "tool_call>" not in text),
)
def test_what_a_model_calls_is_what_the_client_reads(calls: list[tuple[str, dict[str, Any]]], before: str) -> None:
    blocks = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    if any("tool_call>" in block for block in blocks):
        return  # tags within a call are no call
    rest, told = told_calls(before + "".join(f"<tool_call>{block}</tool_call>" for block in blocks), "a")
    assert rest == before.strip()
    assert [(call.function.name, json.loads(call.function.arguments)) for call in told] == calls


def drawn(text: str, finish_reason: str = "stop") -> CompletionResponse:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return CompletionResponse.model_validate(
        {"id": "cmpl-1", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    )


def answer_to(text: str, finish_reason: str = "stop", **asked: Any) -> ChatCompletion:
    request = ChatRequest.model_validate({"model": "m", "messages": ASKED, **asked})
    return chat_completion(request, drawn(text, finish_reason), lambda _: b"", "chatcmpl-1", [1])


def test_a_call_ends_the_answer_whole_and_in_a_stream() -> None:
    answer = answer_to(SAID, tools=[TIDE])
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("tide", {"port": "nørth", "day": 2})
    chunks = ChatChunks(StreamStart(answer_id="chatcmpl-1", created=1), "m")
    grown = [text_before_calls(SAID[:n]) for n in range(len(SAID))]
    early = [chunk for text in grown for chunk in chunks.grown((text,))]
    sent = [chunk.choices[0] for chunk in (*early, *chunks.rest(answer))]
    assert [piece.delta.get("tool_calls") for piece in sent if "tool_calls" in piece.delta] == [
        [{"index": 0, **call.model_dump()}]
    ]
    assert sent[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("finish_reason", "asked"),
    [("stop", {}), ("stop", {"tools": [TIDE], "tool_choice": "none"}), ("length", {"tools": [TIDE]})],
)
def test_what_was_not_offered_or_not_finished_is_text(finish_reason: str, asked: dict[str, Any]) -> None:
    [choice] = answer_to(SAID, finish_reason, **asked).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (SAID, None, finish_reason)


def with_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "tide", "parameters": schema}}


LONG = {"type": "object", "properties": {"port": {"type": "string", "description": "x" * (64 << 10)}}}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"tools": [{"type": "function"}]}, r"tools[\s\S]*\[0\]: a tool is"),
        (
            {"tools": [{"type": "function", "function": {"name": "tide", "input_schema": {"type": "object"}}}]},
            r"\[0\].function: the schema of arguments is `parameters`",
        ),
        ({"tools": [TIDE, {"type": "web_search"}]}, r"tools[\s\S]*\[1\]: a tool is"),
        ({"tools": [TIDE], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "there is no such tool"),
        ({"tools": [with_parameters({"type": "string"})], "tool_choice": "required"}, 'a schema of "type": "object"'),
        ({"tools": [with_parameters(LONG)], "tool_choice": "required"}, "65,536 characters can be forced"),
        ({"tools": [TIDE], "response_format": {"type": "json_object"}}, "do not go together"),
    ],
)
def test_tools_that_are_none_and_calls_that_cannot_be_forced_are_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ChatRequest.model_validate({"model": "m", "messages": ASKED, **asked})


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen"), "qwen")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatPrompts]:
    prompts = ChatPrompts(HostContext(Settings(root=tmp_path_factory.mktemp("root"))))
    yield prompts
    prompts.close()


@pytest.mark.parametrize("messages", [ASKED, GONE_ON])
def test_the_model_is_told_of_tools_as_transformers_tells_it(
    qwen: Path, prompts: ChatPrompts, messages: list[dict[str, Any]]
) -> None:
    """The template gets arguments as objects: with the client's text it would write a text within a text."""
    from transformers import AutoTokenizer

    as_objects = json.loads(json.dumps(messages).replace('"{\\"port\\": \\"north\\"}"', '{"port": "north"}'))
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    expected = tokenizer.apply_chat_template(as_objects, tools=[TIDE], add_generation_prompt=True, return_dict=False)
    model = Artifact(uri=qwen.as_uri(), sha256=seal(qwen))
    assert list(prompts.prompt(model, messages, [TIDE]).ids) == expected
    assert list(prompts.prompt(model, messages).ids) != expected
