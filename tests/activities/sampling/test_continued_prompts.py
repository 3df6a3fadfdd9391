"""Prompts of an episode: what was drawn stays as it was drawn, and only what is new is tokenized."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from activities.host_context import HostContext
from activities.sampling.questions import ChatPrompts, Prompt
from longshore.fields import Artifact
from shared.chat.episodes import conversation_digest
from shared.chat.messages import CalledFunction, ChatAnswer, ToolCall
from shared.chat.trajectories import AnswerRecord, DrawnChoice
from shared.settings import Settings
from shared.storage.artifacts import seal
from tests.activities.templates import TEMPLATES, open_model, write_model

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "How many sacks?"}]
AGAIN: dict[str, Any] = {"role": "user", "content": "Sure?"}
ENDS = {"llama": "<|eot_id|>", "mistral": "</s>"}
TIDE = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}
CALLED = '<tool_call>\n{"name": "tide",  "arguments": {}}\n</tool_call>'  # with one blank more than templates write


class Episode:
    """Answers of one template's model, each found by the conversation that it ends."""

    def __init__(self, folder: Path, prompts: ChatPrompts, end: str) -> None:
        self.model = Artifact(uri=folder.as_uri(), sha256=seal(folder))
        self.tokenizer = open_model(folder)
        self._prompts, self._end = prompts, end
        self._begin = " " if folder.name == "mistral" else ""  # which the model writes, too
        self._answers: dict[str, AnswerRecord] = {}

    def prompt(self, messages: list[dict[str, Any]], tools: Any = ()) -> Prompt:
        return self._prompts.prompt(self.model, messages, tools, self._answers.get)

    def draw(
        self, prompt: Prompt, answer: ChatAnswer, text: str, *, is_cut: bool = False, in_bytes: bool = False
    ) -> tuple[int, ...]:
        """An answer's ids: its text as training tokenizes it, or letter by letter, which no tokenizer would."""
        pieces = [*(self._begin + text)] if in_bytes else [self._begin + text]
        ids = [i for piece in pieces for i in self.tokenizer.tokens_of(piece)]
        ids += [] if is_cut else self.tokenizer.tokens_of(self._end)
        choice = DrawnChoice(
            content=answer.content,
            tool_calls=answer.tool_calls or (),
            token_ids=tuple(ids),
            logprobs=(-1.0,) * len(ids),
            finish_reason="length" if is_cut else "stop",
        )
        record = AnswerRecord(answer_id="a", model_sha256=self.model.sha256, prompt_ids=prompt.ids, choices=(choice,))
        self._answers[prompt.conversation(answer)] = record
        return (*prompt.ids, *ids)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatPrompts]:
    prompts = ChatPrompts(HostContext(Settings(root=tmp_path_factory.mktemp("root"))))
    yield prompts
    prompts.close()


@pytest.fixture(params=sorted(TEMPLATES))
def episode(request: pytest.FixtureRequest, prompts: ChatPrompts, tmp_path: Path) -> Episode:
    folder = write_model(tmp_path / request.param, request.param)
    return Episode(folder, prompts, ENDS.get(request.param, "<|im_end|>"))


def said(answer: ChatAnswer) -> dict[str, Any]:
    return answer.model_dump(mode="json", exclude_none=True)


def test_canonical_answers_continue_to_the_ids_of_the_whole_conversation(episode: Episode) -> None:
    messages, drawn = list(ASKED), ()
    for number in range(4):
        prompt = episode.prompt(messages)
        assert prompt.continues is bool(number) is (prompt.after is not None)
        assert prompt.ids[: len(drawn)] == drawn
        assert prompt.ids == episode._prompts.prompt(episode.model, messages).ids
        answer = ChatAnswer(content=f"There are {number} sacks.")
        drawn = episode.draw(prompt, answer, str(answer.content))
        messages += [said(answer), AGAIN]


def test_drawn_ids_stay_however_they_were_tokenized(episode: Episode) -> None:
    first = episode.prompt(ASKED)
    answer = ChatAnswer(content="There are 12 sacks.")
    drawn = episode.draw(first, answer, "There are 12 sacks.", in_bytes=True)
    messages = [*ASKED, said(answer), AGAIN]
    later, whole = episode.prompt(messages), episode._prompts.prompt(episode.model, messages)
    assert later.continues and later.ids[: len(drawn)] == drawn
    assert later.ids != whole.ids
    assert episode.tokenizer.decode(later.ids) == episode.tokenizer.decode(whole.ids)


def test_an_answer_that_was_cut_off_is_closed_by_the_template(episode: Episode) -> None:
    answer = ChatAnswer(content="There are 12")
    drawn = episode.draw(episode.prompt(ASKED), answer, "There are 12", is_cut=True)
    messages = [*ASKED, said(answer), AGAIN]
    later = episode.prompt(messages)
    assert later.continues and later.ids[: len(drawn)] == drawn
    assert later.ids == episode._prompts.prompt(episode.model, messages).ids


def test_a_call_stays_as_the_model_wrote_it(prompts: ChatPrompts, tmp_path: Path) -> None:
    episode = Episode(write_model(tmp_path / "qwen", "qwen"), prompts, "<|im_end|>")
    call = ToolCall(id="c1", function=CalledFunction(name="tide", arguments="{}"))
    answer = ChatAnswer(content="Let me see.", tool_calls=(call,))
    drawn = episode.draw(episode.prompt(ASKED, [TIDE]), answer, f"Let me see.\n{CALLED}")
    renamed = said(answer) | {"tool_calls": [call.model_copy(update={"id": "toolu_9"}).model_dump()]}
    later = episode.prompt([*ASKED, renamed, {"role": "tool", "tool_call_id": "toolu_9", "content": "low"}], [TIDE])
    assert later.continues and later.ids[: len(drawn)] == drawn
    assert episode.tokenizer.decode(later.ids).endswith("low\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    other_tools = episode.prompt([*ASKED, renamed, {"role": "tool", "content": "low"}], [TIDE, TIDE])
    assert other_tools.after is None, "the tools are in the prompt, so it is another conversation"


def test_a_template_that_takes_thoughts_away_begins_a_branch(prompts: ChatPrompts, tmp_path: Path) -> None:
    episode = Episode(write_model(tmp_path / "qwen", "qwen"), prompts, "<|im_end|>")
    thoughtful = "<think>\nhm\n</think>\n\nThere are 12."
    answer = ChatAnswer(content=thoughtful)
    drawn = episode.draw(episode.prompt(ASKED), answer, thoughtful)
    asked_again = episode.prompt([*ASKED, said(answer), AGAIN])
    assert asked_again.after and not asked_again.continues and "hm" not in episode.tokenizer.decode(asked_again.ids)
    told = episode.prompt([*ASKED, said(answer), {"role": "tool", "content": "low"}])
    assert told.continues and told.ids[: len(drawn)] == drawn, "after a tool's answer they stay"


def test_another_history_is_no_continuation(episode: Episode) -> None:
    answer = ChatAnswer(content="There are 12 sacks.")
    episode.draw(episode.prompt(ASKED), answer, "There are 12 sacks.")
    for changed in (
        [{"role": "user", "content": "How many?"}, said(answer)],
        [*ASKED, said(ChatAnswer(content="12."))],
    ):
        assert episode.prompt([*changed, AGAIN]).after is None


def test_a_slow_store_of_one_agent_keeps_nobody_else_waiting(prompts: ChatPrompts, tmp_path: Path) -> None:
    episode = Episode(write_model(tmp_path / "qwen", "qwen"), prompts, "<|im_end|>")
    messages = [*ASKED, said(ChatAnswer(content="12.")), AGAIN]
    is_asked, may_answer = threading.Event(), threading.Event()

    def earlier(_: str) -> None:
        is_asked.set()
        assert may_answer.wait(60)

    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(prompts.prompt, episode.model, messages, (), earlier)
        assert is_asked.wait(60)
        try:
            assert threads.submit(prompts.prompt, episode.model, messages).result(30).ids
        finally:
            may_answer.set()
        assert slow.result(60).after is None


def test_conversations_are_told_apart_by_what_they_say() -> None:
    call: dict[str, Any] = {"function": {"name": "tide", "arguments": {"a": 1, "b": 2}}, "id": "x"}
    one = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    other_id = [{"role": "assistant", "tool_calls": [call | {"id": "y"}]}]
    other = [{"role": "assistant", "tool_calls": [{"function": {"name": "tide", "arguments": {"a": 1}}}]}]
    assert conversation_digest(one, None) == conversation_digest(other_id, None)
    assert len({conversation_digest(m, t) for m, t in ((one, None), (other, None), (one, [TIDE]), ([], None))}) == 4
