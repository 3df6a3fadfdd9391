"""Sessions that go on from saved states, and that score labels of their own."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from longshore.commands import Datum, Forward, ForwardBackward, OptimStep, SaveState
from longshore.training import Lora
from shared.jobs.commands import Skip
from shared.jobs.events import Kept
from tests.megatron_worker.session_jobs import (
    data_of,
    do_all,
    load,
    result,
    session_job,
    sft_commands,
    state_of,
)
from tests.megatron_worker.tiny_jobs import checkpoint, new_worker
from tests.megatron_worker.workshop import Workshop, make_workshop, read_log, sealed


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return make_workshop(tmp_path_factory.mktemp("session"))


def test_a_loaded_state_goes_on_as_in_the_session_that_saved_it(workshop: Workshop, tmp_path: Path) -> None:
    """Whatever was trained before, and with gradients that nobody stepped."""
    commands = sft_commands(workshop)
    source = do_all(workshop, tmp_path / "source", [*commands[:4], SaveState(), *commands[4:8], SaveState()])
    others = [*commands[6:8], SaveState(), commands[0], load(source, 5), *commands[4:8], SaveState()]
    job = do_all(workshop, tmp_path / "other", others, seed=11)
    assert result(job, 5).problem is None and result(job, 5).step == 5
    assert state_of(job, 5) == state_of(source, 5)
    assert state_of(job, 10) == state_of(source, 10)
    assert [e.step for e in read_log(job.log_path) if isinstance(e, Kept)] == [3, 10], "a load keeps no state"
    for start in (3, 5):  # as a new worker does, before the load or behind it
        again = session_job(workshop, tmp_path / f"from-{start}", others, start=checkpoint(job, start), seed=11)
        new_worker(workshop.root).do_one(again)
        assert state_of(again, 10) == state_of(job, 10), start


def test_a_state_without_its_optimizer_is_a_published_adapter(workshop: Workshop, tmp_path: Path) -> None:
    """A session that begins with the adapter makes the same steps."""
    commands = sft_commands(workshop)
    source = do_all(workshop, tmp_path / "source", [*commands[:4], SaveState()])
    adapter = sealed(Path(source.checkpoint_dir) / "step-00000005" / "weights")
    begun = do_all(workshop, tmp_path / "begun", commands[4:8], initial_adapter=adapter)
    loading = [*commands[6:8], load(source, 5, optimizer=False), *commands[4:8]]
    job = do_all(workshop, tmp_path / "loading", loading)
    assert state_of(job, 7) == state_of(begun, 4)
    with_moments = do_all(workshop, tmp_path / "moments", [load(source, 5), *commands[4:8]])
    assert state_of(with_moments, 5) != state_of(begun, 4)


@pytest.mark.parametrize("bad", ["missing", "rank", "base", "damaged"])
def test_a_state_that_does_not_fit_changes_nothing(workshop: Workshop, tmp_path: Path, bad: str) -> None:
    commands = sft_commands(workshop)[:4]
    lora = Lora(rank=8, alpha=8) if bad == "rank" else Lora(rank=4, alpha=8)
    source = do_all(workshop, tmp_path / "source", commands[:2], trainable=lora)
    asked = load(source, 2)
    folder = Path(source.checkpoint_dir) / "step-00000002"
    match bad:
        case "missing":
            (folder / "manifest.json").unlink()
        case "base":
            state = json.loads((folder / "state.json").read_bytes())
            (folder / "state.json").write_text(json.dumps(state | {"model_sha256": "0" * 64}))
            asked = asked.model_copy(update={"checkpoint": sealed(folder)})
        case "damaged":
            with (folder / "optimizer" / "optimizer.safetensors").open("r+b") as file:
                file.seek(-1, 2)
                file.write(b"\x7f")
    rules = {"missing": "missing", "rank": "rank is 8, 4 is asked for", "base": "another base", "damaged": "SHA-256"}
    job = do_all(workshop, tmp_path / "bad", [commands[0], asked, *commands[1:]])
    problem = result(job, 2).problem
    assert problem is not None and rules[bad] in problem.message
    plain = do_all(workshop, tmp_path / "plain", [commands[0], Skip(), *commands[1:]])
    assert state_of(job, 5) == state_of(plain, 5)


def labelled(datum: Datum, labels: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None = None) -> Datum:
    return Datum.model_validate({"tokens": datum.tokens, "labels": labels, "label_weights": weights})


def test_labels_that_are_the_next_tokens_change_no_bit(workshop: Workshop, tmp_path: Path) -> None:
    data = data_of(workshop, 0)
    same = tuple(
        labelled(datum, [[token] for token in datum.tokens[1:]], [[weight] for weight in datum.weights or ()])
        for datum in data
    )
    step = OptimStep(learning_rate=0.05)
    jobs = [
        do_all(workshop, tmp_path / name, [ForwardBackward(data=each), step])
        for name, each in (("plain", data), ("labels", same))
    ]
    assert result(jobs[0], 1).data == result(jobs[1], 1).data
    assert state_of(jobs[0], 2) == state_of(jobs[1], 2)


def test_a_teacher_s_likeliest_tokens_are_several_labels_in_a_place(workshop: Workshop, tmp_path: Path) -> None:
    """Their gradients are the sum of each one's, and what is scored are the ids that were asked for."""
    datum = data_of(workshop, 0)[0]
    scored = do_all(workshop, tmp_path / "scored", [Forward(data=(Datum(tokens=datum.tokens),), top_k=3)])
    found = result(scored, 1).data
    assert found is not None and found[0].top_ids is not None and found[0].top_logprobs is not None
    ids = [list(each) for each in found[0].top_ids]
    ids[1] = []  # a place without any
    weights = [[0.5, 0.25, 0.0][: len(each)] for each in ids]
    together = labelled(datum, ids, weights)
    apart = [labelled(datum, [each[k : k + 1] for each in ids], [each[k : k + 1] for each in weights]) for k in (0, 1)]
    step = OptimStep(learning_rate=0.05, denominator=1)
    one = do_all(workshop, tmp_path / "one", [ForwardBackward(data=(together,)), step])
    two = do_all(workshop, tmp_path / "two", [*(ForwardBackward(data=(each,)) for each in apart), step])
    norms = [result(one, 2).metrics["grad_norm"], result(two, 3).metrics["grad_norm"]]
    assert norms[0] > 0 and norms[0] == pytest.approx(norms[1], rel=1e-5)
    scores = result(one, 1).data
    assert scores is not None
    wanted = [pair for k, pair in enumerate(found[0].top_logprobs) if k != 1]
    assert scores[0].logprobs == pytest.approx([value for pair in wanted for value in pair[:2]], abs=1e-6)
