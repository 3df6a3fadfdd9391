"""Converts tool calls between two forms: of chat completions, and in the text of an answer.

In texts the form of Qwen's and Hermes' templates is recognised: for each call `<tool_call>`, a JSON object with a name
and arguments, `</tool_call>`. Other forms stay text.
"""

import json

from shared.chat.messages import CalledFunction, ChatRequest, ToolCall, name_of, parameters_of
from shared.chat.structured_outputs import StructuralTag, StructuredOutputs, Tag, TagContent, Tags

_BEGIN, _END = "<tool_call>", "</tool_call>"
NO_CALLS: tuple[ToolCall, ...] = ()


def forced_calls(asked: ChatRequest) -> StructuredOutputs | None:
    """Return the form of an answer that calls one of the forced tools, or several; None if none is forced."""
    tags = [
        Tag(
            begin=f'{_BEGIN}\n{{"name": {json.dumps(name_of(tool), ensure_ascii=False)}, "arguments": ',
            content=TagContent(json_schema=parameters_of(tool)),
            end=f"}}\n{_END}",
        )
        for tool in asked.forced_tools
    ]
    if not tags:
        return None
    tag = StructuralTag(format=Tags(tags=tags, stop_after_first=asked.may_call_once))
    return StructuredOutputs(structural_tag=tag.model_dump_json())


def told_calls(text: str, answer_id: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Split an answer into text and tool calls. If one call is broken, the whole answer is text.

    `answer_id`: unique to this answer; the calls' ids contain it.
    """
    blocks, rest = _taken_out(text)
    functions = [_function(block) for block in blocks]
    calls = [function for function in functions if function is not None]
    if not calls or len(calls) < len(functions) or _BEGIN in rest or _END in rest:
        return text, NO_CALLS
    numbered = (ToolCall(id=f"call_{answer_id}_{i}", function=function) for i, function in enumerate(calls))
    return rest.strip(), tuple(numbered)


def text_before_calls(text: str) -> str:
    """Return an unfinished answer's text before its first tool call, without a tail that may be the start of a call."""
    begin = text.find(_BEGIN)
    if begin < 0:
        begin = next((n for n in range(max(0, len(text) - len(_BEGIN)), len(text)) if _BEGIN.startswith(text[n:])), -1)
    return (text if begin < 0 else text[:begin]).rstrip()


def _taken_out(text: str) -> tuple[list[str], str]:
    """Split a text into the blocks between tags and the rest, in linear time even if many tags are not closed."""
    blocks, around, at = [], [], 0
    while (begin := text.find(_BEGIN, at)) >= 0 and (end := text.find(_END, begin)) >= 0:
        around.append(text[at:begin])
        blocks.append(text[begin + len(_BEGIN) : end])
        at = end + len(_END)
    return blocks, "".join((*around, text[at:]))


def _function(block: str) -> CalledFunction | None:
    try:
        said = json.loads(block)
    except (ValueError, RecursionError):
        return None
    match said:
        case {"name": str(name), "arguments": dict(arguments)} if name:
            return CalledFunction(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
        case _:
            return None
