"""Episodes of a user's environment on the real system: played without training, trained, and shown."""

import json
import re
from pathlib import Path

import pytest

from longshore import local
from tests.end_to_end.conftest import QUICK
from tests.end_to_end.runs import jsonl
from tests.end_to_end.stack import Stack, wait_until
from tests.end_to_end.test_episodes import CLIENTS
from tests.megatron_worker.rows import talking_model

pytestmark = pytest.mark.slow

COUNTS = """
class Environment:
    def reset(self, item, seed):
        self.num, self.word = 0, item["word"]
        return f"Say {self.word}."

    def step(self, answer):
        self.num += 1
        if self.word == "storm":
            raise ValueError("all hands")
        return {"reward": 1 / (1 + len(answer["content"])), "observation": "Again.", "done": self.num == 3}
"""


_SLEEPS = "        time.sleep(3 * (self.word == 'rope'))\n"


def _view(stack: Stack, run_id: str) -> dict:
    with stack.client() as client:
        return client.runs.get(run_id).model_dump(mode="json")


@pytest.fixture(scope="module")
def played(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a command that plays episodes for four prompts, the last of which breaks the environment."""
    folder = tmp_path_factory.mktemp("played")
    (folder / "counts.py").write_text(COUNTS)
    rows = [{"prompt": "Here.", "word": word} for word in ("rope", "tar", "sail", "storm")]
    model = talking_model(folder / "model")
    return [
        *("--model", str(model), "--prompts", str(jsonl(folder / "prompts.jsonl", rows)), "--max-turns", "4"),
        *("--environment", str(folder / "counts.py"), "--max-completion-tokens", "48", "--max-tokens", "400"),
    ]


def test_episodes_are_played_without_training_and_shown(stack: Stack, played: list[str]) -> None:
    ended = stack.cli("rollout", *played, "-n", "4", "--seed", "3", "--json").json
    run_id, metrics = ended["run_id"], ended["metrics"]
    assert metrics["eval_samples"] == 16 and metrics["eval_ungraded"] == 4
    assert metrics["eval_episode_end_environment_broke"] == 0.25 and metrics["eval_episode_kept_share"] == 1
    assert 0 < metrics["eval_reward_mean"] <= 3
    assert not list((stack.root / "store" / "runs" / run_id / "checkpoints").glob("*")), "nothing was trained"

    def shown(*options: str) -> list[dict]:
        found: list[dict] = stack.cli("episodes", run_id, "--of", "eval", "--json", *options).json
        return found

    everyone = shown()
    assert [one["number"] for one in everyone] == list(range(16)) and everyone[-1]["group"] == 3
    broken = shown("--failed")
    assert [one["number"] for one in broken] == [12, 13, 14, 15]
    assert all(one["episode"]["error"] == "ValueError: all hands (line 10)" for one in broken)
    whole = next(one for one in everyone if one["episode"]["end"] == "completed")
    told = stack.cli("episodes", run_id, "--of", "eval", "--number", str(whole["number"])).stdout
    assert "user: Say " in told and told.count("user: Again.") == 3
    assert told.splitlines()[-1] == f"--- completed, reward {whole['episode']['reward']:g}"
    assert "environment_broke" in stack.cli("episodes", run_id, "--of", "eval").stdout
    refused = stack.cli("episodes", run_id, check=False)
    assert refused.code == 100 and "no step of" in refused.stderr


def test_a_run_says_how_many_of_its_episodes_run_wait_and_have_ended_and_why(
    stack: Stack, played: list[str], tmp_path: Path
) -> None:
    """Half of them break in their first step; the others sleep in each of theirs."""
    slow = tmp_path / "slow.py"
    slow.write_text("import time\n" + COUNTS.replace("        self.num += 1\n", "        self.num += 1\n" + _SLEEPS))
    rows = [{"prompt": "Here.", "word": word} for word in ("rope", "storm")]
    mine = {"--prompts": str(jsonl(tmp_path / "prompts.jsonl", rows)), "--environment": str(slow)}
    options = [mine.get(before, each) for before, each in zip(["", *played], played, strict=False)]
    once = ("--steps", "1", "--prompts-per-step", "2", "--group-size", "4", "--max-ungraded-fraction", "1")
    loss = ("--algorithm", "rloo", "--lora-rank", "4", "--seed", "3")
    run_id = stack.cli("submit", "rl", *options, *once, *loss, "--json").json["run_id"]

    def told() -> dict | None:
        view = _view(stack, run_id)
        now = view.get("samples_now") or {"ended": {}}
        return view if view["state"] != "running" or now["ended"].get("environment_broke") else None

    now = wait_until(told, "an episode has ended, and others go on")["samples_now"]
    assert now["running"] + now["waiting"] + now.get("before", 0) + sum(now["ended"].values()) == 8, now
    assert "ValueError: all hands (line 12)" in now["errors"][0], now
    words = stack.cli("get", run_id).stdout
    assert re.search(r"^samples: \d running, \d waiting, \d ended \(.*environment broke \d", words, re.MULTILINE), words
    assert "without a reward: ValueError: all hands" in words
    assert stack.cli("watch", run_id, "--json").json["status"] == "succeeded"
    assert "samples_now" not in _view(stack, run_id)


def test_a_step_shows_its_episodes_as_they_were_trained(stack: Stack, played: list[str]) -> None:
    own = ("--steps", "1", "--prompts-per-step", "4", "--group-size", "4", "--max-ungraded-fraction", "1")
    loss = ("--algorithm", "rloo", "--credit", "turn", "--lora-rank", "4")
    ended = stack.cli("submit", "rl", *played, *own, *loss, "--seed", "3", "--wait", "--json").json
    assert ended["status"] == "succeeded", ended
    step = stack.cli("steps", ended["run_id"], "--json").json[-1]
    assert step["metrics"]["failed_groups"] == 1 and step["metrics"]["groups"] == 3
    with stack.client() as client:
        groups = client.runs.rollouts(ended["run_id"], 1)
        assert len(client.runs.samples(ended["run_id"], 1, limit=100)) == 16
    for one in (sample for group in groups for sample in group.samples):
        assert one.end in ("completed", "turn_limit", "token_limit", "context_limit")
        drawn = [part for part in one.parts if part.is_drawn]
        assert not one.parts or len(drawn) == len(one.turn_rewards or ())
        assert not drawn or drawn[0].text.endswith("<|im_end|>")


def test_slow_episodes_are_carried_over(stack: Stack, played: list[str], tmp_path: Path) -> None:
    """The tool of two prompts sleeps in each of its turns. Whichever steps take them, each prompt is trained once."""
    slow = tmp_path / "slow.py"
    source = COUNTS.replace(
        "        self.num += 1\n", "        self.num += 1\n        time.sleep(4 * (self.word == 'slow'))\n"
    )
    slow.write_text("import time\n" + source.replace('"storm"', '"never"'))
    rows = [{"prompt": f"Here, {n}.", "word": "slow" if n in (3, 4) else "rope"} for n in range(12)]
    mine = {"--prompts": str(jsonl(tmp_path / "prompts.jsonl", rows)), "--environment": str(slow)}
    options = [mine.get(before, each) for before, each in zip(["", *played], played, strict=False)]
    own = ("--steps", "6", "--prompts-per-step", "2", "--group-size", "4", "--off-policy-steps", "2", "--carry-over")
    loss = ("--loss", "ppo", "--lora-rank", "4", "--learning-rate", "0.001", "--seed", "3")
    ended = stack.cli("submit", "rl", *options, *own, *loss, "--wait", "--json").json
    assert ended["status"] == "succeeded", ended
    steps = stack.cli("steps", ended["run_id"], "--json").json
    assert sum(step["metrics"]["groups"] for step in steps) == 12
    trained = [
        json.loads(line)["metadata"]["row"]
        for step in steps
        for line in Path(step["groups"].removeprefix("file://")).read_text().splitlines()
    ]
    assert sorted(trained) == list(range(12))
    assert all(step["metrics"]["group_lag_max"] < step["step"] for step in steps)
    assert steps[-1]["carried"]["left"] == {} and steps[-1]["metrics"]["carried_groups"] == 0


def test_a_local_run_plays_the_same_episodes(stack: Stack, played: list[str], tmp_path: Path) -> None:
    own = ("--steps", "2", "--prompts-per-step", "3", "--group-size", "4", "--max-ungraded-fraction", "1")
    ended = stack.cli("submit", "rl", *played, *own, "--algorithm", "rloo", "--lora-rank", "4", "--wait", "--json").json
    with stack.client() as client:
        run = client.runs.get(ended["run_id"]).run
    assert local.train(run, tmp_path).adapter_sha256 == ended["adapter_sha256"]


def test_an_environment_that_never_works_ends_the_run_with_the_line(
    stack: Stack, played: list[str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(COUNTS.replace('self.word == "storm"', "True"))
    options = [str(broken) if each.endswith("counts.py") else each for each in played]
    few = ("--steps", "1", "--prompts-per-step", "4", "--group-size", "2", "--algorithm", "rloo", "--lora-rank", "4")
    ended = stack.cli("submit", "rl", *options, *few, "--wait", "--json", check=False).json
    assert ended["status"] == "failed"
    assert "ValueError: all hands (line 10)" in ended["problem"]["message"]
    broken.write_text(COUNTS.replace('item["word"]', 'item["work"]'))
    refused = stack.cli("rollout", *options, "--json", check=False).json
    assert "reset: KeyError: 'work' (line 4)" in str(refused)


def test_the_environment_of_the_documentation_is_played(stack: Stack, played: list[str], tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    [source] = re.findall(r"```python\n(class Environment:.*?)```", page, re.S)
    (tmp_path / "capitals.py").write_text(source)
    rows = jsonl(tmp_path / "rows.jsonl", [{"prompt": f"Which city is {n}?", "capital": "e"} for n in range(4)])
    mine = {"--prompts": str(rows), "--environment": str(tmp_path / "capitals.py")}
    options = [mine.get(before, each) for before, each in zip(["", *played], played, strict=False)]
    metrics = stack.cli("rollout", *options, "-n", "4", "--json").json["metrics"]
    assert metrics["eval_ungraded"] == 0 and metrics["eval_samples"] == 16 and metrics["eval_reward_mean"] >= 0


def test_a_program_with_published_clients_is_trained(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = (Path(__file__).parent / "agent_session.py").read_text()
    tests = {"test.sh": "test -s /logs/agent/output.txt && echo 0.5 > /logs/verifier/reward.txt"}
    rows = [{"prompt": f"Ask, {n}.", "files": {"agent.py": agent}, "tests": tests} for n in range(4)]
    path = ":".join(map(str, CLIENTS))
    options = [
        *("--model", str(talking_model(tmp_path / "model")), "--prompts", str(jsonl(tmp_path / "rows.jsonl", rows))),
        *("--agent", f"PYTHONPATH={path} python agent.py http://127.0.0.1:8321 policy", "--agent-max-turns", "40"),
        *("--max-completion-tokens", "12", "--max-tokens", "600", "--steps", "1", "--prompts-per-step", "2"),
        *("--group-size", "2", "--algorithm", "rloo", "--lora-rank", "4"),
    ]
    ended = stack.cli("submit", "rl", *options, "--wait", "--json", check=False).json
    assert ended["status"] == "succeeded", ended["problem"]
    step = stack.cli("steps", ended["run_id"], "--json").json[-1]
    assert step["metrics"]["reward_mean"] == 0.5 and step["metrics"]["episode_end_completed"] == 1, step
    assert step["metrics"]["episode_turns_mean"] == 3, "token counts and titles do not count"
    with stack.client() as client:
        run = client.runs.get(ended["run_id"]).run
    monkeypatch.setenv("LONGSHORE_AGENTS__PROGRAMS", QUICK["LONGSHORE_AGENTS__PROGRAMS"])
    assert local.train(run, tmp_path / "local").adapter_sha256 == ended["adapter_sha256"]
