"""Local runs: without a server, the same run gives the same files. tests/end_to_end/test_local_rl.py has one of RL."""

from pathlib import Path
from typing import Any

import pytest

from examples import local_sft
from longshore import local
from longshore.dataset_runs import DistillRun, SFTRun
from longshore.runs import RLRun
from longshore.training import SessionRun
from shared.errors import InvalidInput
from shared.runs.start import threads_per_rank
from shared.settings import Settings
from tests.end_to_end.conftest import LETTERS
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
