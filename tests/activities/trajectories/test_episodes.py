"""Episodes as trajectories: each answer after its own prompt, once, in the branch that it belongs to."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from activities.trajectories.read_groups import (
    BrokenTrajectory,
    Conversations,
    PublishedPolicy,
    RememberedAnswers,
    Rules,
    parse_groups,
    read_groups,
    sequences_of,
)
from longshore.fields import Artifact
from shared.chat.completions import Usage
from shared.chat.episodes import (
    EpisodeTurn,
    TurnPlace,
    answered_turn,
    begun_at,
    check_turns,
    end_episode,
    expired_keys,
    look_up_either,
    record_turn,
)
from shared.chat.messages import ChatAnswer, ChatChoice, ChatCompletion
from shared.chat.trajectories import (
    AnswerRecord,
    DrawnChoice,
    EpisodeTrajectory,
    Trajectory,
    new_answer_id,
    remember,
)
from shared.errors import InvalidInput
from shared.storage.store import LocalStore
from tests.activities.groups import rl_run, trajectory, write_groups
from tests.activities.trajectories.chat_server import sampled_ids

MODEL = Artifact(uri="file:///m", sha256="a" * 64)
EPISODE = f"ep-{int(time.time()):08x}{'0' * 16}"
MAX_TOKENS = 64


class Agent:
    """Answers of our choosing to one episode, kept as a host keeps them."""

    def __init__(self, store: LocalStore) -> None:
        self.store = store
        self._num = 0

    def place(self, name: str, *, is_side: bool = False, max_turns: int = 100) -> TurnPlace:
        return TurnPlace(episode=EPISODE, digest=name * 64, is_side=is_side, max_turns=max_turns)

    def turn(
        self, asked: Sequence[int], drawn: Sequence[int], *, is_side: bool = False, version: int = 3, **changes: Any
    ) -> list[int]:
        """Keep an answer. Returns its prompt and it."""
        self._num += 1
        choice = DrawnChoice(content="a", token_ids=tuple(drawn), logprobs=(-0.5,) * len(drawn), finish_reason="stop")
        record = AnswerRecord(
            answer_id=new_answer_id(time.time()),
            model_sha256=MODEL.sha256,
            name="harbour",
            version=version,
            prompt_ids=tuple(asked),
            choices=(choice,),
        ).model_copy(update=changes)
        remember(self.store, "north", record)
        told = ChatChoice(index=0, message=ChatAnswer(content="a"), finish_reason="stop")
        usage = Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2)
        answer = ChatCompletion(id=record.answer_id, created=1, model="m", choices=[told], usage=usage)
        turn = EpisodeTurn(answer=answer, at=float(self._num), is_side=is_side)
        record_turn(self.store, "north", self.place("0123456789abcdef"[self._num]), turn, f"{self._num}")
        return [*asked, *drawn]

    def read(self, tenant: str = "north", model: Artifact = MODEL, **fields: Any) -> tuple[Trajectory, ...]:
        answers = RememberedAnswers(partial(look_up_either, self.store, tenant))
        with Conversations(model, None, answers, PublishedPolicy(2, "harbour", 4)) as reader:
            sent = EpisodeTrajectory.model_validate({"episode": EPISODE, "reward": 1.0} | fields)
            return reader.episode_of(sent, MAX_TOKENS)


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(LocalStore(tmp_path))


def test_turns_that_go_on_are_one_sequence_and_what_branches_is_trained_once(agent: Agent) -> None:
    first = agent.turn([1, 2], [3, 4])
    helper = agent.turn([9, 9], [8])
    second = agent.turn([*first, 5], [6], version=4)
    agent.turn([*helper, 7], [7])
    agent.turn([1, 2, 30], [31])  # the history was rewritten
    agent.turn([50], [51], is_side=True)
    agent.turn([*second, 10], [11, 12])
    end = end_episode(agent.store, "north", EPISODE)
    assert (len(end.answer_ids), end.num_side_turns) == (6, 1)

    main, sub, rewritten = agent.read(metrics={"turns": 6})
    assert main.token_ids == (1, 2, 3, 4, 5, 6, 10, 11, 12) and sampled_ids(main) == [3, 4, 6, 11, 12]
    assert sub.token_ids == (9, 9, 8, 7, 7) and sampled_ids(sub) == [8, 7]
    assert rewritten.token_ids == (1, 2, 30, 31) and sampled_ids(rewritten) == [31]
    assert main.policy_versions == (None, None, 1, 1, None, 2, None, 1, 1)
    assert {one.reward for one in (main, sub, rewritten)} == {1.0} and main.metrics == {"turns": 6.0}


def test_a_branch_from_the_middle_does_not_train_what_is_before_it_again(agent: Agent) -> None:
    first = agent.turn([1, 2], [3, 4])
    agent.turn([*first, 5], [6])
    agent.turn([*first, 7], [8])  # a second question to the same history
    end_episode(agent.store, "north", EPISODE)
    one, other = agent.read()
    assert (sampled_ids(one), sampled_ids(other)) == ([3, 4, 6], [8])
    assert other.token_ids == (1, 2, 3, 4, 7, 8) and other.logprobs[:5] == (None,) * 5


def test_what_cannot_be_trained_is_named(agent: Agent) -> None:
    def rule(**changes: Any) -> str:
        with pytest.raises(BrokenTrajectory) as broken:
            agent.read(**changes)
        return broken.value.rule

    agent.turn([1], [2])
    assert rule() == "unknown_episode", "it has not ended"
    end_episode(agent.store, "north", EPISODE)
    assert rule(tenant="south") == rule(episode="ep-1") == rule(episode="../north") == "unknown_episode"
    assert rule(model=Artifact(uri="file:///n", sha256="b" * 64)) == "another_model"
    for info in list(agent.store.list("answers/")):
        agent.store.delete(info.key)
    assert rule() == "unknown_answer"


def test_an_end_is_written_once(agent: Agent) -> None:
    agent.turn([1], [2])
    end = end_episode(agent.store, "north", EPISODE)
    agent.turn([1, 2, 3], [4])  # was under way
    assert end_episode(agent.store, "north", EPISODE) == end and len(end.answer_ids) == 1


def test_an_empty_episode_and_one_that_is_too_long_are_broken(agent: Agent) -> None:
    end_episode(agent.store, "north", EPISODE)
    with pytest.raises(BrokenTrajectory, match="no answer that counts"):
        agent.read()
    long = Agent(LocalStore(Path(agent.store.uri.removeprefix("file://")) / "other"))
    long.turn(range(60), range(60, 70))
    end_episode(long.store, "north", EPISODE)
    with pytest.raises(BrokenTrajectory, match="70 tokens; max_tokens is 64"):
        long.read()


def test_the_first_answer_to_a_question_counts(agent: Agent) -> None:
    agent.turn([1], [2])
    [place] = [agent.place(name) for name in "1"]
    first = answered_turn(agent.store, "north", place)
    assert first is not None
    other = EpisodeTurn(answer=first.model_copy(update={"id": "chatcmpl-2"}), at=9.0, is_side=False)
    assert record_turn(agent.store, "north", place, other, "c") == first
    check_turns(agent.store, "north", agent.place("a", max_turns=2))
    with pytest.raises(InvalidInput, match="has had its 1 turns"):
        check_turns(agent.store, "north", agent.place("a", max_turns=1))
    assert answered_turn(agent.store, "south", place) is None


def test_groups_may_hold_episodes_beside_other_trajectories(agent: Agent, tmp_path: Path) -> None:
    agent.turn([1, 2], [3, 4])
    agent.turn([9], [8])
    end_episode(agent.store, "north", EPISODE)
    path = tmp_path / "groups.jsonl"
    unknown = {"episode": f"{EPISODE[:-1]}1", "reward": 0.5}
    write_groups(path, {"trajectories": [{"episode": EPISODE, "reward": 1.0}, trajectory(0.0), unknown]})
    answers = RememberedAnswers(partial(look_up_either, agent.store, "north"))
    with Conversations(MODEL, None, answers, PublishedPolicy(4, "harbour", 4)) as reader:
        read = read_groups(parse_groups(path, path.name), Rules(rl_run(max_tokens=64, broken="drop"), 4, 1000, reader))
    [group] = read.groups
    assert len(sequences_of(group)) == 3 and [one.reward for one in group] == [1.0, 0.0, 0.5]
    assert read.report.dropped_for == {"unknown_episode": 1}
    assert read.report.turns == {"remembered_turns": 2, "episode_branches": 2}


def test_old_episodes_are_found_by_their_ids(agent: Agent) -> None:
    agent.turn([1], [2])
    end_episode(agent.store, "north", EPISODE)
    began = begun_at(EPISODE)
    assert list(expired_keys(agent.store, began, 1 << 20)) == []
    for keys in (expired_keys(agent.store, began + 1, 1 << 20), expired_keys(agent.store, 0, 100)):
        assert sum(EPISODE in key for key in keys) == 3
