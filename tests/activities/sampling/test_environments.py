"""Episodes with a user's environment: drawn, kept, earned, refused. A real sampler, and the real sandbox."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.grading.grade import Grade, Graded, GradeRequest
from activities.host_context import HostContext
from activities.sampling.agents import CheckEnvironment, CheckEnvironmentRequest
from activities.sampling.sample import Sampled
from activities.trajectories.group_samples import GROUPS, Grouped, GroupSamples, GroupSamplesRequest
from activities.trajectories.pack_trajectories import GroupsRequest, PackTrajectories
from longshore.fields import Artifact
from longshore.grading import EnvironmentGrader
from longshore.views import StepStatus
from shared.chat.trajectories import Trajectory, TrajectoryGroup
from shared.errors import InvalidInput
from shared.settings import GradingSettings, Settings
from shared.storage.artifacts import seal, stage, upload_artifact
from shared.storage.store import LocalStore
from tests.activities.groups import rl_run
from tests.activities.sampling.conftest import (
    GROUP_SIZE,
    Place,
    cancelled_when,
    groups_in,
    proxy_of,
    rendered,
    request_of,
    sampled,
    settings_of,
)
from tests.activities.templates import open_model
from tests.megatron_worker.rows import talking_model
from tests.megatron_worker.sampler_process import running

NUM, TURNS, TOKENS = 3, 4, 64  # prompts, most answers of an episode, and most tokens of an answer
COUNTS = """
class Environment:
    def reset(self, item, seed):
        self.letter, self.told = item["letter"], 0
        return f"Letter {self.letter} for {seed % 7}?"

    def step(self, answer):
        self.told += 1
        found = 1 + answer["content"].count(self.letter)
        said = {"observation": f"{found} of them.", "reward": found, "done": self.told == 3}
        return said | {"metrics": {"told": self.told}}
"""


@pytest.fixture(scope="module")
def talker(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A place whose model ends its answers after a few tokens."""
    folder = tmp_path_factory.mktemp("talker")
    model = talking_model(folder / "model")
    copy = shutil.copytree(model, folder / "copy")
    seal(copy)
    artifact = upload_artifact(LocalStore(folder / "given"), "model", copy)
    with running(model, folder, "--logprobs-mode", "processed_logprobs", "--max-model-len", "512") as sampler:
        yield dataclasses.replace(place, model=artifact, sampler=sampler)


def played(
    settings: Settings,
    place: Place,
    source: str,
    environment: ActivityEnvironment | None = None,
    max_turns: int = TURNS,
    max_tokens: int = 512,
    **changes: Any,
) -> Sampled:
    plan = {"environment": {"source": source, "max_turns": max_turns}, "source": {"uri": "file:///rows"}}
    own = {"rows": {"first": 0, "count": NUM, "seed": 5}, "adapter": None, "run_id": "r1"}
    own |= {"sampling": {"temperature": 1.3, "max_tokens": TOKENS}} | changes
    request = request_of(place, rendered(settings, place), episodes=plan | {"max_tokens": max_tokens}, **own)
    return sampled(settings, request, environment)


def graded(settings: Settings, found: Sampled) -> Graded:
    request = GradeRequest(samples=found.samples, grader=EnvironmentGrader())
    done: Graded = ActivityEnvironment().run(Grade(HostContext(settings)).grade, request)
    return done


def grouped(settings: Settings, found: Sampled, **changes: Any) -> tuple[Grouped, list[TrajectoryGroup]]:
    request = GroupSamplesRequest(completions=found.completions, grades=graded(settings, found).grades, **changes)
    made: Grouped = ActivityEnvironment().run(GroupSamples(HostContext(settings)).group_samples, request)
    folder = stage(made.groups, settings.root_path / "cache", settings.s3)
    return made, [TrajectoryGroup.model_validate_json(line) for line in (folder / GROUPS).read_text().splitlines()]


def drawn_of(one: Trajectory) -> list[int]:
    return [token for token, is_drawn in zip(one.token_ids, one.sampled, strict=True) if is_drawn]


def test_what_is_trained_is_what_was_drawn(talker: Place, tmp_path: Path) -> None:
    with proxy_of(talker.sampler.url) as proxy:
        settings = settings_of(tmp_path, talker, proxy.url)
        found = played(settings, talker, COUNTS)
        answers = {tuple(body["prompt"]): body for _, body in proxy.asked if "prompt" in body}
    made, groups = grouped(settings, found)
    assert [len(group.trajectories) for group in groups] == [GROUP_SIZE] * NUM
    assert found.episodes is not None and found.episodes.num == NUM * GROUP_SIZE
    assert found.episodes.num_kept == found.episodes.num_later > NUM * GROUP_SIZE, "every later turn keeps the ids"
    num_drawn = 0
    for group, samples in zip(groups, groups_in(settings, found), strict=True):
        assert len({one.token_ids[: one.sampled.index(True)] for one in group.trajectories}) == 1, "they begin alike"
        for one, sample in zip(group.trajectories, samples.samples, strict=True):
            assert sample.course is not None and one.turn_rewards == sample.course.turn_rewards
            ends = [n for n in range(len(one.sampled)) if one.sampled[n] and not (*one.sampled, False)[n + 1]]
            begins = [n for n in range(1, len(one.sampled)) if one.sampled[n] and not one.sampled[n - 1]]
            assert len(ends) == len(one.turn_rewards) == sample.course.num_turns
            # Each prompt was asked for as it is trained: all that was drawn before it is in it.
            assert all(one.token_ids[:begin] in answers for begin in begins)
            assert one.reward == sum(one.turn_rewards) and one.metrics["told"] >= 1
            assert all((p is not None) is is_drawn for p, is_drawn in zip(one.logprobs, one.sampled, strict=True))
            said = [message["content"] for message in sample.course.messages if message["role"] == "user"]
            assert said[0].startswith("Letter ") and all(text.endswith(" of them.") for text in said[1:])
            num_drawn += len(drawn_of(one))
    assert num_drawn == found.num_tokens
    assert made.num_ungraded == made.num_failed == 0
    assert found.metrics["episode_end_completed"] > 0.5


def test_an_attempt_after_a_kill_goes_on_from_the_turns_that_were_drawn(talker: Place, tmp_path: Path) -> None:
    whole = settings_of(tmp_path / "whole", talker)
    expected = played(whole, talker, COUNTS)
    assert expected.episodes is not None
    with proxy_of(talker.sampler.url) as proxy:
        settings = settings_of(tmp_path / "killed", talker, proxy.url)
        proxy.hold_after = 20
        turns = settings.root_path / "store" / "sampled"
        cancelled_when(
            lambda: len(list(turns.glob("*-turns/*.json"))) >= 20,
            lambda environment: played(settings, talker, COUNTS, environment),
        )
        proxy.asked.clear()
        proxy.hold_after = 1 << 62
        found = played(settings, talker, COUNTS)
        assert len(proxy.prompts()) == expected.episodes.num_turns - 20
    assert found.completions.sha256 == expected.completions.sha256
    assert found.samples.sha256 == expected.samples.sha256
    assert not list(turns.glob("*-turns/*")) and not list(turns.glob("*-parts/*"))


STEP = """
import math, os, time
class Environment:
    def reset(self, item, seed):
        self.num = 0
    def step(self, answer):
        self.num += 1
        if self.num == 1:
            return {"reward": 2, "observation": "Go on."}
        BODY
"""
SCORE = "\n    def score(self):\n        return 10 * self.num\n"
MUTATIONS: dict[str, tuple[str, str, float | str]] = {
    "done": ('return {"reward": 0.5, "done": True}', "completed", 2.5),
    "a score counts, too": ('return {"done": True}' + SCORE, "completed", 22.0),
    "never done": ('return {"observation": "On."}', "turn_limit", 2.0),
    "no observation": ("return {}", "turn_limit", 2.0),
    "messages": ('return {"observation": [{"role": "user", "content": "x"}]}', "turn_limit", 2.0),
    "never returns": ("time.sleep(1000)", "step_limit", 2.0),
    "never ends": ("while True: pass", "step_limit", 2.0),
    "never returns, and is scored before": ("time.sleep(1000)" + SCORE, "step_limit", 12.0),
    "returns 100 MB": ('return {"observation": "x" * 100_000_000}', "step_limit", 2.0),
    "takes all memory": ("x = bytearray(1 << 40)", "step_limit", 2.0),
    "ends its process": ("os._exit(3)", "step_limit", 2.0),
    "raises": ('raise KeyError("no sacks")', "environment_broke", "KeyError: 'no sacks' (line 10)"),
    "forks": ("os.fork()", "environment_broke", "PermissionError: [Errno 1] Operation not permitted (line 10)"),
    "kills itself": ("os.kill(os.getpid(), 9)", "environment_broke", "PermissionError: [Errno 1]"),
    "no number": (
        'return {"reward": math.nan}',
        "environment_broke",
        "ValueError: Out of range float values are not JSON compliant",
    ),
    "a word": ('return {"reward": "high"}', "environment_broke", "it returned what it must not: reward: "),
    "beyond all": ('return {"reward": 1e300}', "environment_broke", "it returned what it must not: reward: "),
    "another name": ('return {"rewards": 1}', "environment_broke", "it returned what it must not: rewards: "),
    "no dict": ("return 1", "environment_broke", "step returned a int, and not a dict"),
    "no message": (
        'return {"observation": [{"text": "x"}]}',
        "environment_broke",
        "it returned what it must not: observation: messages[0]",
    ),
    "half a character": ('return {"observation": "\\ud800", "done": True}', "environment_broke", "a text holds half"),
    "a deep one": (
        'return {"observation": [{"role": "user", "content": eval("[" * 150 + "]" * 150)}]}',
        "environment_broke",
        "it returned what is nested too deep",
    ),
    "a metric's name": ('return {"metrics": {"a b": 1}}', "environment_broke", "it returned what it must not: metrics"),
    "an object": ("return {1: object()}", "environment_broke", "TypeError: Object of type object is not JSON"),
    "a score that raises": ("return {}\n    def score(self): return [][0]", "environment_broke", "IndexError: list"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_end_has_a_name_and_a_reward_or_a_reason(name: str, talker: Place, tmp_path: Path) -> None:
    body, end, told = MUTATIONS[name]
    settings = settings_of(tmp_path, talker).model_copy(update={"grading": GradingSettings(python_time_s=1.0)})
    found = played(settings, talker, STEP.replace("BODY", body), rows={"first": 0, "count": 1, "seed": 5}, group_size=3)
    [group] = groups_in(settings, found)
    courses = [one.course for one in group.samples if one.course is not None]
    longer = [course for course in courses if course.num_turns > 1 and course.end != "token_limit"]
    assert longer, "no episode has come to its second step"
    assert {course.end for course in longer} == {end}
    if isinstance(told, float):
        assert {course.reward for course in longer} == {told}
        assert not any(course.error for course in longer)
        return
    assert all(course.reward is None and str(course.error).startswith(told) for course in longer), courses


def test_a_group_with_an_environment_that_broke_is_left_out_whole(talker: Place, tmp_path: Path) -> None:
    """One of its samples may break it more often than others: the rest would compare with the wrong mean."""
    settings = settings_of(tmp_path, talker)
    odd = 'if len(answer["content"]) % 2: raise ValueError("late")'
    breaks = STEP.replace("BODY", f'{odd}\n        return {{"done": True}}')
    breaks = breaks.replace('"observation"', '"done": self.seed % 3 == 0, "observation"')
    breaks = breaks.replace("self.num = 0", "self.num, self.seed = 0, seed")
    found = played(settings, talker, breaks)
    samples = groups_in(settings, found)
    broken = [any(one.course and one.course.end == "environment_broke" for one in group.samples) for group in samples]
    assert 0 < sum(broken) < NUM
    partly = [any(one.course and one.course.reward is not None for one in group.samples) for group in samples]
    assert any(one and other for one, other in zip(broken, partly, strict=True)), "each sample of them broke"
    made, groups = grouped(settings, found, max_ungraded_fraction=1)
    assert made.num_failed == sum(broken) == made.metrics["failed_groups"]
    assert len(groups) == NUM - sum(broken) and made.num_ungraded == GROUP_SIZE * sum(broken)
    with pytest.raises(InvalidInput, match=r"more than max_ungraded_fraction 0.1; first: .*late \(line 10\)"):
        grouped(settings, found)


def test_an_environment_without_any_reward_is_not_worth_0(talker: Place, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, talker)
    source = STEP.replace("BODY", 'return {"done": True}').replace('"reward": 2, ', "")
    found = played(settings, talker, source)
    summary = graded(settings, found).summary
    ends = [one.course and one.course.end for group in groups_in(settings, found) for one in group.samples]
    assert 0 < summary.num_failed == ends.count("completed"), "what the policy ended itself is worth what it earned"
    assert any("give one in step, or define score" in reason for reason in summary.reasons)


def ends_of(settings: Settings, found: Sampled) -> set[str]:
    courses = [one.course for group in groups_in(settings, found) for one in group.samples]
    return {course.end for course in courses if course is not None}


def test_limits_of_turns_answers_and_conversations_end_episodes(talker: Place, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, talker)
    goes_on = STEP.replace("BODY", 'return {"observation": "On."}')
    assert ends_of(settings, played(settings, talker, goes_on, max_turns=1)) <= {"turn_limit", "token_limit"}
    short = played(settings, talker, goes_on, sampling={"temperature": 1.3, "max_tokens": 1})
    assert ends_of(settings, short) == {"token_limit"}
    narrow = played(settings, talker, goes_on, max_turns=64, max_tokens=100)
    assert "context_limit" in ends_of(settings, narrow)
    lengths = {
        len(group.prompt_ids) + len(one.token_ids) for group in groups_in(settings, narrow) for one in group.samples
    }
    assert max(lengths) <= 100


SHOP = """
class Environment:
    def reset(self, item, seed):
        self.stock = {"rope": 3}

    def step(self, answer):
        calls = [call["arguments"]["of"] for call in answer["tool_calls"] if call["name"] == "count"]
        if calls:
            texts = [f"{of}: {self.stock.get(of, 0)}" for of in calls]
            if len(calls) == 1:
                return {"observation": texts[0]}
            messages = [
                {"role": "tool", "tool_call_id": call["id"], "content": text}
                for call, text in zip(answer["tool_calls"], texts)
            ]
            return {"observation": messages}
        return {"reward": float("3" in answer["content"]), "done": True}
"""
CALL = '<tool_call>\n{"name": "count", "arguments": {"of": "%s"}}\n</tool_call>'


def scripted(
    talker: Place,
    root: Path,
    said: list[str],
    source: str,
    row: dict[str, Any],
    model: Artifact | None = None,
    newer_from: int | None = None,
) -> tuple[Settings, Sampled]:
    """Play an episode in which the model says what is written, and not what it would draw.

    `newer_from`: the turn from which on the sampler says that version 4 draws, and not the request's 3.
    """
    tokenizer = open_model(Path(talker.model.uri.removeprefix("file://")))

    def script(asked: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        turn = tokenizer.decode(asked["prompt"]).count("<|im_start|>assistant") - 1
        ids = tokenizer.tokens_of(said[turn] + "<|im_end|>")
        logprobs = {"tokens": [""] * len(ids), "token_logprobs": [-1.0] * len(ids)}
        own = {"text": said[turn], "token_ids": ids, "finish_reason": "stop", "logprobs": logprobs}
        if newer_from is not None and turn >= newer_from:
            own["policy_versions"] = [4] * len(ids)
        return answer | {"choices": [answer["choices"][0] | own]}

    (root / "rows").mkdir(parents=True)
    (root / "rows" / "rows.jsonl").write_text(json.dumps(row) + "\n")
    seal(root / "rows")
    dataset = upload_artifact(LocalStore(root / "given"), "rows", root / "rows")
    asked = dataclasses.replace(talker, dataset=dataset, model=model or talker.model)
    with proxy_of(talker.sampler.url) as proxy:
        proxy.said = script
        settings = settings_of(root, talker, proxy.url)
        return settings, played(settings, asked, source, rows={"first": 0, "count": 1, "seed": 5}, group_size=2)


def test_calls_are_parsed_and_answered_by_messages_of_tools(talker: Place, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}
    said = ["I look." + CALL % "rope", CALL % "rope" + CALL % "tar", "There are 3."]
    row = {"messages": [{"role": "user", "content": "How many ropes?"}], "tools": [tool]}
    settings, found = scripted(talker, tmp_path, said, SHOP, row)
    _, [group] = grouped(settings, found)
    tokenizer = open_model(Path(talker.model.uri.removeprefix("file://")))
    for one, sample in zip(group.trajectories, groups_in(settings, found)[0].samples, strict=True):
        assert sample.course is not None and sample.course.end == "completed" and one.reward == 1.0
        roles = [(message["role"], message["content"]) for message in sample.course.messages]
        assert roles == [
            ("assistant", "I look."),
            ("tool", "rope: 3"),
            ("assistant", ""),
            ("tool", "rope: 3"),
            ("tool", "tar: 0"),
            ("assistant", "There are 3."),
        ]
        calls = [sample.course.messages[n]["tool_calls"] for n in (0, 2)]
        assert [len(each) for each in calls] == [1, 2]
        assert sample.course.messages[1]["tool_call_id"] == calls[0][0]["id"]
        # The model's own way of writing a call stays, and the results are never trained.
        assert tokenizer.decode(drawn_of(one)) == "".join(f"{text}<|im_end|>" for text in said)
        assert "tool\nrope: 3" in tokenizer.decode(one.token_ids)


FORGETS = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{{- message.content.split('</think>')[-1] if not loop.last else message.content }}{{ '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
ASKS = """
class Environment:
    def reset(self, item, seed):
        self.num = 0

    def step(self, answer):
        self.num += 1
        return {"observation": "And now?", "reward": self.num, "done": self.num == 3}
"""


def test_a_template_that_forgets_thoughts_makes_branches_and_each_token_is_trained_once(
    talker: Place, tmp_path: Path
) -> None:
    folder = shutil.copytree(Path(talker.model.uri.removeprefix("file://")), tmp_path / "forgets")
    (folder / "manifest.json").unlink()
    for file in folder.glob("chat_template*"):
        file.unlink()
    told = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": FORGETS}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    seal(folder)
    model = upload_artifact(LocalStore(tmp_path / "models"), "model", folder)
    said = ["<think>sacks</think>one", "<think>tar</think>two", "three"]
    row = {"messages": [{"role": "user", "content": "Count."}]}
    settings, found = scripted(talker, tmp_path, said, ASKS, row, model)
    assert found.episodes is not None and found.metrics["episode_kept_share"] == 0
    _, [group] = grouped(settings, found)
    tokenizer = open_model(folder)
    for one in group.trajectories:
        assert [tokenizer.decode(drawn_of(each)) for each in (one, *one.branches)] == [f"{t}<|im_end|>" for t in said]
        assert one.turn_rewards == (1, 2, 3) and one.reward == 6
    # Taken by the packer, too, and every drawn token is a target once.
    step = StepStatus(step=1, key="1", groups=grouped(settings, found)[0].groups_uri)
    own = {"prompts": {"uri": "file:///prompts"}, "environment": {"source": ASKS}, "steps": 1, "group_size": 2}
    run = rl_run(max_tokens=512, rollouts=own | {"max_completion_tokens": TOKENS}, equal_rewards="keep")
    pack = GroupsRequest(run_id="r1", tenant="default", run=run, step=step, policy_version=3, vocab_size=512)
    result = ActivityEnvironment().run(PackTrajectories(HostContext(settings)).pack_trajectories, pack)
    assert (
        result.metrics["response_tokens"]
        == found.num_tokens
        == 2 * sum(len(tokenizer.tokens_of(f"{text}<|im_end|>")) for text in said)
    )
    assert result.metrics["reward_mean"] == 6


def test_each_id_has_the_version_that_drew_it(talker: Place, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "Count."}]}
    settings, found = scripted(talker, tmp_path, ["one", "two", "three"], ASKS, row, newer_from=1)
    _, [group] = grouped(settings, found)
    ends = len(open_model(Path(talker.model.uri.removeprefix("file://"))).tokens_of("one<|im_end|>"))
    for one in group.trajectories:
        assert one.policy_versions is not None and one.policy_version == 3
        assert one.token_versions == [3] * ends + [4] * (sum(one.sampled) - ends)


def test_an_environment_that_does_not_begin_is_refused_before_anything_is_drawn(talker: Place, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, talker)
    prompts = rendered(settings, talker)

    def check(source: str, **changes: Any) -> None:
        plan = {"environment": {"source": source}, "source": {"uri": "file:///rows"}, "max_tokens": 64} | changes
        request = CheckEnvironmentRequest.model_validate(
            {"plan": plan, "prompts": prompts.prompts, "model": talker.model}
        )
        ActivityEnvironment().run(CheckEnvironment(HostContext(settings)).check_environment, request)

    check(COUNTS)
    for source, reason in {
        "class Environment: pass": "reset: AttributeError: 'Environment' object has no attribute 'reset'",
        "Environment = 1": "reset: TypeError: 'int' object is not callable",
        "class Environment\n": "reset: SyntaxError: expected ':'",
        COUNTS.replace('item["letter"]', 'item["word"]'): "reset: KeyError: 'word' (line 4) (rows.jsonl:1)",
        COUNTS.replace('return f"', 'return 1 or f"'): "reset: it returned what it must not: observation",
        COUNTS.replace('return f"', 'return [{"role": "clown"}] or f"'): "messages",
    }.items():
        with pytest.raises(InvalidInput) as refused:
            check(source)
        assert reason in str(refused.value)


def test_an_environment_that_begins_in_two_ways_is_refused(talker: Place, tmp_path: Path) -> None:
    """Its samples would not be comparable, nor the same after a kill."""
    settings = settings_of(tmp_path, talker)
    chance = COUNTS.replace("class", "import os\nclass").replace("{seed % 7}", "{os.urandom(8).hex()}")
    with pytest.raises(InvalidInput, match="reset returns different things for one row and seed"):
        played(settings, talker, chance)
