"""Local runs: without a server, after a kill, the same run gives the same files.

The RL run has experts, and prompts of two sources.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from examples import demo, local_rl, local_sft
from examples.tiny_model import make_tiny_model
from longshore import local
from longshore.dataset_runs import DistillRun, SFTRun
from longshore.runs import RLRun, RunRecord
from longshore.training import SessionRun
from longshore.views import StepStatus
from shared.errors import InvalidInput
from shared.runs.start import threads_per_rank
from shared.settings import Settings
from tests.conftest import CORPUS
from tests.depth import drawn, one_of
from tests.end_to_end.conftest import DRAWN_FILES, LETTERS
from tests.end_to_end.local_runs import files, interrupted
from tests.end_to_end.stack import Stack

_STEPS = 60


@pytest.mark.slow
def test_a_fine_tuning_gives_a_services_bytes_after_a_kill(
    stack: Stack, tiny_model: Path, chat_dataset: Path, tmp_path: Path
) -> None:
    run = local_sft.request(str(tiny_model), chat_dataset, _STEPS)
    with stack.client() as client:
        served = client.runs.wait(client.runs.submit(run).run_id, 900)
    assert served.state == "succeeded", served
    folder = tmp_path / "local"
    arguments = [str(tiny_model), str(chat_dataset), str(folder), "--steps", str(_STEPS), "--threads", "1"]
    *told, uri = interrupted(local_sft.__file__, arguments, folder, "store/runs/*/checkpoints/*/*/manifest.json")
    steps = [int(line.partition(" ")[0]) for line in told]
    assert steps[0] > 1 and steps == list(range(steps[0], _STEPS + 1)), "it continued from a checkpoint"
    assert files(uri) == files(served.adapter)

    more: list[int] = []
    again = local.train(run, folder, on_metrics=lambda step, _: more.append(step))
    assert (again.adapter, again.adapter_sha256, more) == (uri, served.adapter_sha256, [])
    assert (again.state, again.step, again.epoch) == ("succeeded", _STEPS, 2)
    assert again.metrics.keys() == served.metrics.keys() and again.metrics["loss"] == served.metrics["loss"]
    with pytest.raises(InvalidInput, match="threads: the run began with 1"):
        local.train(run, folder, threads=2)
    with local.locked(folder), pytest.raises(InvalidInput, match="another local run is using it"):
        local.train(run, folder)


def test_threads_are_those_of_a_service_on_this_machine(tmp_path: Path) -> None:
    """The run ends at its data, which is not there, when it has been accepted."""
    run = SFTRun.model_validate({**_dataset(tmp_path), "model": str(tmp_path / "none")})
    with pytest.raises(InvalidInput, match="none"):
        local.train(run, tmp_path / "root")
    with pytest.raises(InvalidInput, match=f"threads: the run began with {threads_per_rank(run, Settings())},"):
        local.train(run, tmp_path / "root", threads=4096)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (SFTRun, {"layout": {"dp": 2, "nodes": 2}}, "layout.nodes: a local run is of one machine"),
        (SFTRun, {"layout": {"dp": 4096}, "batch_size": 4096}, "layout.dp: 4,096 ranks"),
        (
            DistillRun,
            {"teacher": "https://x/v1", "teacher_model": "t", "tokens": "drawn", "teacher_key": "k"},
            "teacher_key: ",
        ),
        (SessionRun, {}, "kind: a local run is one on a dataset"),
        (RLRun, {"rollouts": None}, "rollouts: nobody sends groups"),
        (RLRun, {"sampler": "vllm"}, "rollouts.sampler: "),
        (RLRun, {"sampler_url": "http://x"}, "rollouts.sampler_url: "),
        (RLRun, {"samplers": 2}, "rollouts.samplers: a local run has one sampler"),
        (RLRun, {"colocate": True}, "rollouts.colocate: "),
        (RLRun, {"weight_sync": {"backend": "tcp"}}, "rollouts.weight_sync.backend: .*: auto or store"),
        (RLRun, {"weight_sync": {"in_flight": "continue"}, "off_policy_steps": 1}, "rollouts.weight_sync.in_flight: "),
        (RLRun, {"carry_over": True, "off_policy_steps": 1}, "rollouts.carry_over: a local run samples, and then"),
        (RLRun, {"weight_sync": {"profile_path": "syncs"}}, "rollouts.weight_sync.profile_path: "),
        (RLRun, {"grader": {"type": "reward_model", "name": "g", "model": "r"}}, "rollouts.grader: .* reward model"),
    ],
)
def test_what_a_local_run_cannot_do_is_refused_by_field(
    tmp_path: Path, kind: Any, changes: dict[str, Any], message: str
) -> None:
    fields = {"model": "file:///none"} if kind is SessionRun else _dataset(tmp_path)
    if kind is RLRun:
        own = {
            "prompts": {"uri": "file:///none"},
            "grader": LETTERS,
            "steps": 1,
            "group_size": 2,
            "prompts_per_step": 2,
        }
        own |= {"max_completion_tokens": 8}
        fields = {
            "model": "file:///none",
            "max_tokens": 64,
            "rollouts": None if "rollouts" in changes else own | changes,
        }
    else:
        fields |= changes
    with pytest.raises(InvalidInput, match=f"^{message}"):
        local.train(kind.model_validate(fields), tmp_path / "root")
    assert not (tmp_path / "root").exists(), "it was refused before anything was made"


def _dataset(folder: Path) -> dict[str, Any]:
    return {"model": "file:///none", "dataset": {"uri": (folder / "none").as_uri()}, "steps": 1, "batch_size": 4}


FAMILIES = drawn(["qwen3_moe", "qwen3_5_moe"], 1)


@pytest.fixture(scope="module", params=FAMILIES)
def record(request: pytest.FixtureRequest, stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """A run that a server has ended: experts, sampled a step ahead, with two optimizer steps a train step."""
    folder = tmp_path_factory.mktemp("prompts")
    model = make_tiny_model(folder / "model", CORPUS, family=request.param)
    for name, numbers in (("train", range(20)), ("more", range(30, 35)), ("eval", range(20, 24)), ("even", (20, 22))):
        rows = ({"messages": [{"role": "user", "content": f"Name ship {n}."}]} for n in numbers)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"uri": f"{folder}/more.jsonl", "name": "more"}
    answer = stack.cli(
        *("submit", "rl", "--json", "--model", str(model), "--grader", json.dumps(LETTERS)),
        *("--prompts", f"{folder}/train.jsonl:0.75", "--prompts", json.dumps(more | {"weight": 0.25})),
        *("--eval", f"all={folder}/eval.jsonl", "--eval", f"even={folder}/even.jsonl", "--eval-every", "2"),
        *("--steps", "3", "--prompts-per-step", "4", "--group-size", "4", "--max-completion-tokens", "12"),
        *("--off-policy-steps", "1", "--mini-batches", "2", "--algorithm", "grpo", "--temperature", "0.8"),
        *("--lora-rank", "4", "--learning-rate", "0.01", "--max-tokens", "64", "--seed", "7"),
        "--wait",
    )
    return RunRecord.model_validate_json((_folder(stack, answer.json["run_id"]) / "run.json").read_bytes())


@pytest.mark.slow
@one_of(DRAWN_FILES, "local_rl")
def test_steps_are_the_servers_after_a_kill(stack: Stack, record: RunRecord, tmp_path: Path) -> None:
    server, folder = _steps(_folder(stack, record.run_id)), tmp_path / "local"
    assert isinstance(record.run, RLRun)
    (tmp_path / "run.json").write_text(record.run.model_dump_json())
    arguments = [str(tmp_path / "run.json"), str(folder), "--threads", str(record.threads_per_rank)]
    *told, uri = interrupted(local_rl.__file__, arguments, folder, "store/runs/*/steps/00000001.json")
    assert [json.loads(line)["step"] for line in told] in ([2, 3], [3]), "it continued after the last recorded step"
    [run] = (folder / "store" / "runs").iterdir()
    local = _steps(run)
    assert [step.step for step in local] == [0, 1, 2, 3] and local[-1].adapter == uri
    assert local[-1].metrics["staleness_max"] == 1
    for ours, theirs in zip(local, server, strict=True):
        assert ours.state == theirs.state == "done"
        assert _told(ours) == _told(theirs)
        drawn = [ours.metrics.get(f"prompts_{name}") for name in ("1", "more")]
        assert drawn == ([3, 1] if ours.step else [None, None])
        if "eval_reward_mean" in ours.metrics:
            of_sets = [ours.metrics[f"eval_{name}_reward_mean"] for name in ("all", "even")]
            assert ours.metrics["eval_reward_mean"] == pytest.approx((4 * of_sets[0] + 2 * of_sets[1]) / 6)
        assert ours.step == 0 or ours.metrics["probe_difference_max"] < 1e-4
        assert ours.step == 0 or files(ours.adapter) == files(theirs.adapter)
    weights = load_file(_weights(local[-1]))
    trained = [name for name, weight in weights.items() if ".lora_B." in name and weight.any()]
    assert {name.split(".mlp.experts.")[1][0] for name in trained if ".mlp.experts." in name} == set("0123")


@pytest.mark.slow
@one_of(DRAWN_FILES, "local_rl")
def test_the_api_tells_every_step_from_the_beginning(
    stack: Stack, record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "ROOT", stack.root)
    told = demo.steps_of({"run_id": record.run_id})
    assert [step["step"] for step in told] == [0, 1, 2, 3]
    assert [step["step"] for step in told if "eval_reward_mean" in step["metrics"]] == [0, 2, 3]
    with stack.client() as client:
        estimate = client.estimate(record.run)
    assert (estimate.steps, estimate.examples, estimate.samples) == (3, 25, 3 * 4 * 4)


def _folder(stack: Stack, run_id: str) -> Path:
    return stack.root / "store" / "runs" / run_id


def _steps(run: Path) -> list[StepStatus]:
    return [StepStatus.model_validate_json(path.read_bytes()) for path in sorted((run / "steps").iterdir())]


def _told(step: StepStatus) -> dict[str, float]:
    """The metrics that do not depend on how fast or where it was done."""
    told = step.metrics.items()
    return {n: v for n, v in told if not n.startswith("sync_") and not n.endswith(("_s", "_seconds", "_bytes"))}


def _weights(step: StepStatus) -> Path:
    assert step.adapter is not None
    return Path(step.adapter.removeprefix("file://"), "adapter_model.safetensors")
