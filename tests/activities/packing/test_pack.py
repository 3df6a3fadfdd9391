"""The pack activity: plans that hold what was asked for, the same every time."""

from pathlib import Path

import numpy as np
import pytest
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.tokenizing.units import PackDataset, Packed, PackRequest, write_plan
from longshore.fields import Artifact
from shared.errors import InvalidInput
from shared.jobs.packed import Plan, UnitsWriter
from shared.settings import S3Settings, Settings
from shared.storage.artifacts import seal, stage, upload_artifact
from shared.storage.store import LocalStore

LENGTHS = np.random.Generator(np.random.PCG64(1)).integers(5, 60, 100)


def a_request(units: Artifact | None = None, **fields: object) -> PackRequest:
    units = units or Artifact(uri="file:///units", sha256="0" * 64)
    return PackRequest.model_validate({"units": units, "seed": 3, "bin_tokens": 128, **fields})


def steps_of(folder: Path, request: PackRequest, lengths: np.ndarray = LENGTHS) -> list[list[list[int]]]:
    header = write_plan(lengths, request, folder)
    plan = Plan(folder)
    return [[each.tolist() for each in plan.bins(k)] for k in range(header.num_steps)]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [unit for step in steps for each in step for unit in each]


def test_epochs_hold_every_unit_once_each_in_an_order_of_its_own(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, a_request(epochs=2, batch_size=8))
    assert len(steps) == 26 and len(flat(steps[12:13])) == 4, "an epoch's last step holds what is left"
    assert sorted(flat(steps[:13])) == sorted(flat(steps[13:])) == list(range(100))
    assert sorted(flat(steps[:1])) != sorted(flat(steps[13:14]))
    assert all(sum(LENGTHS[each]) <= 128 for step in steps for each in step)


def test_a_fraction_of_an_epoch_is_the_beginning_of_it(tmp_path: Path) -> None:
    whole = steps_of(tmp_path / "whole", a_request(epochs=2, batch_size=10))
    part = steps_of(tmp_path / "part", a_request(epochs=1.25, batch_size=10))
    assert part[:12] == whole[:12] and len(flat(part)) == 125
    assert len(flat(steps_of(tmp_path / "little", a_request(epochs=0.001, batch_size=10)))) == 1


def test_steps_go_round_the_epochs_and_stop_when_told(tmp_path: Path) -> None:
    by_steps = steps_of(tmp_path / "steps", a_request(steps=30, batch_tokens=300))
    by_epochs = steps_of(tmp_path / "epochs", a_request(epochs=3, batch_tokens=300))
    assert len(by_steps) == 30 and by_steps == by_epochs[:30]


def test_what_a_step_holds_does_not_depend_on_the_bins(tmp_path: Path) -> None:
    for k, batch in enumerate([{"batch_size": 16}, {"batch_tokens": 700}]):
        plans = [
            steps_of(tmp_path / f"{k}-{size}", a_request(epochs=1, bin_tokens=size, **batch))
            for size in (64, 128, 1000)
        ]
        held = [[sorted(flat([step])) for step in plan] for plan in plans]
        assert held[0] == held[1] == held[2]


def test_evaluation_takes_all_units_in_one_step(tmp_path: Path) -> None:
    [step] = steps_of(tmp_path, a_request(whole=True))
    assert sorted(flat([step])) == list(range(100))


def test_bins_of_a_batch_of_tokens_share_it_evenly(tmp_path: Path) -> None:
    header = write_plan(LENGTHS, a_request(epochs=1, batch_tokens=200, bin_tokens=128), tmp_path)
    assert header.bin_tokens == 100


def test_an_example_that_fits_no_bin_or_batch_is_refused(tmp_path: Path) -> None:
    longest = int(LENGTHS.max())
    with pytest.raises(InvalidInput, match=f"bin_tokens: an example has {longest} tokens"):
        write_plan(LENGTHS, a_request(epochs=1, batch_size=2, bin_tokens=longest - 1), tmp_path)
    with pytest.raises(InvalidInput, match="batch_tokens"):
        write_plan(LENGTHS, a_request(epochs=1, batch_tokens=longest - 1), tmp_path)


def make_units(tmp_path: Path) -> Artifact:
    folder, store = tmp_path / "units", LocalStore(tmp_path / "elsewhere")
    writer = UnitsWriter(folder)
    for length in LENGTHS:
        ids = np.arange(length)
        writer.append(token_id=ids, hidden_index=ids[:-1], label=ids[1:], weight=np.ones(length - 1))
    writer.close()
    seal(folder)
    return upload_artifact(store, "units", folder)


def test_the_activity_seals_its_plan_and_a_retry_gives_the_same_at_once(tmp_path: Path) -> None:
    request = a_request(make_units(tmp_path), epochs=1, batch_tokens=800, bin_tokens=400)
    answers: list[Packed] = []
    for machine in ("first", "second"):
        settings = Settings(root=tmp_path / machine, store_uri=f"file://{tmp_path}/{machine}/store")
        for _ in range(2):
            answers.append(ActivityEnvironment().run(PackDataset(HostContext(settings)).pack, request))
        assert not list((tmp_path / machine / "scratch").iterdir())
    assert answers[0] == answers[1] and answers[2] == answers[3]
    assert answers[0].plan.sha256 == answers[2].plan.sha256, "two machines, the same bytes"
    plan = Plan(stage(answers[0].plan, tmp_path / "cache", S3Settings()))
    assert plan.header.num_steps == answers[0].num_steps > 1 and answers[0].packing_efficiency > 0.9


@pytest.mark.parametrize("batch", [{"batch_size": 1}, {"batch_tokens": 16}])
def test_epochs_that_come_to_an_endless_job_are_refused_at_once(tmp_path, batch) -> None:
    units = Artifact(uri="file:///nowhere", sha256="0" * 64)
    request = PackRequest(units=units, seed=0, epochs=1000, bin_tokens=16, **batch)
    with pytest.raises(InvalidInput, match=r"1000 epochs of 1,000 examples are [\d,]+ steps, 50,000 at most"):
        write_plan(np.full(1000, 8), request, tmp_path / "plan")
    assert write_plan(np.full(10, 8), request, tmp_path / "small").num_steps <= 10_000
