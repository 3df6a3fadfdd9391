"""Sessions on two ranks of the Megatron engine: the bytes of the job of that layout, also behind a saved state."""

from pathlib import Path

import pytest

from examples.tiny_model import make_tiny_model
from longshore.commands import Forward, ForwardBackward, SaveState
from longshore.events import Applied
from longshore.training import Layout
from shared.jobs.commands import Command
from shared.jobs.job import Job
from tests.megatron_worker.launch import fork_ranks
from tests.megatron_worker.session_jobs import data_of, packed_alike, result, session_job, sft_commands, state_of
from tests.megatron_worker.tiny_jobs import checkpoint
from tests.megatron_worker.workshop import Workshop, read_log, workshop_of_ids


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    root = tmp_path_factory.mktemp("ranks")
    make_tiny_model(root / "model", ["w " * 50], vocab_size=301)
    return workshop_of_ids(root, root / "model", 301, 2, held_out=[[0, 1], [2], [3]], prompt_ids=[270, 271, 272])


def do(workshop: Workshop, name: str, job: Job) -> Job:
    path = workshop.root / f"{name}.json"
    path.write_text(job.model_dump_json())
    fork_ranks("megatron_worker", "--once", str(path), num_ranks=2)
    return job


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2)], ids=["dp2", "tp2"])
def test_a_session_on_two_ranks_is_its_job_to_the_byte(workshop: Workshop, tmp_path: Path, layout: Layout) -> None:
    """And so is one whose ranks were lost behind a saved state, with gradients that nobody had stepped."""
    name = f"dp{layout.dp}"
    # One bin: with dp 2, a rank has none of it.
    single = Forward(data=data_of(workshop, 1)[:1], entropy=True, top_k=3)
    plan = workshop.plan(data=packed_alike(workshop), layout=layout)
    whole = do(workshop, f"job-{name}", workshop.job(name, plan))
    first, *rest = sft_commands(workshop)
    assert isinstance(first, ForwardBackward)
    halves: list[Command] = [first, rest[0], SaveState(), *rest[1:], single]
    begun = do(workshop, f"begun-{name}", session_job(workshop, tmp_path / "begun", halves[:4], layout=layout))
    start = checkpoint(begun, 3)
    rest_of_it = session_job(workshop, tmp_path / "rest", halves, start=start, layout=layout)
    session = do(workshop, f"rest-{name}", rest_of_it)
    assert [e.command for e in read_log(session.log_path) if isinstance(e, Applied)] == [4, 5, 6]
    assert state_of(session, 6) == state_of(whole, 2)
    scored = result(session, 6).data
    assert scored is not None and scored[0].entropies and scored[0].top_ids
    assert len(scored[0].top_ids) == len(scored[0].entropies) == len(scored[0].logprobs)
    lost, again = result(begun, 4), result(session, 4)
    assert lost.data == again.data and lost.data is not None
    assert [len(scores.logprobs) for scores in lost.data] == [
        sum(weight != 0 for weight in datum.weights or ()) for datum in data_of(workshop, 1)
    ], "each rank computed its part, and all of it is told"
