"""A short one of `python -m tests.chaos`. Each kind of run is killed in the suite by a file of tests/end_to_end."""

import random
from pathlib import Path

import pytest

from tests.chaos.trial import Trial

pytestmark = [pytest.mark.slow, pytest.mark.deep]

NUM_DISTURBANCES = 4


@pytest.mark.timeout(3600)
def test_whatever_is_killed_or_stopped_no_bit_changes(tmp_path: Path, chance: random.Random) -> None:
    """Seven kinds of runs at once; processes of every kind die or stand still, and all of them once."""
    trial = Trial(tmp_path, chance, NUM_DISTURBANCES)
    trial.disturber.everything_at = NUM_DISTURBANCES // 2
    with trial.begun():
        trial.round()
    assert trial.wrong == []
    assert trial.num_equal == 7
    assert trial.disturber.told["killed everything at once"] == 1
