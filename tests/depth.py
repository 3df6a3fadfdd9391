"""How much of what a matrix of kills holds a run of the suite tries: a part, drawn by the seed. `make test-deep`: all.

Tests marked `deep` are variants of others, which `make test-deep` alone runs; tests marked `drawn` are run by both.
"""

import os
import random
import time
from collections.abc import Sequence
from typing import TypeVar

import pytest

Point = TypeVar("Point")
# Processes that share a suite collect the same tests: they inherit the seed of the one that starts them.
SEED = int(os.environ.setdefault("LONGSHORE_TEST_SEED", str(int(time.time()))))
IS_DEEP = bool(os.environ.get("LONGSHORE_TEST_DEEP"))


def one_of(names: Sequence[str], name: str) -> pytest.MarkDecorator:
    """The mark of a test that is one of several scenarios, of which a run of the suite tries one."""
    return pytest.mark.drawn if name in drawn(names, 1) else pytest.mark.deep


def drawn(points: Sequence[Point], num: int, always: Sequence[Point] = ()) -> list[Point]:
    """`num` of the points besides `always`, in their order, by the suite's seed; all of them in a deep run."""
    if IS_DEEP:
        return list(points)
    rest = [place for place, point in enumerate(points) if point not in always]
    chosen = set(random.Random(f"{SEED} of {len(points)}").sample(rest, num))
    return [point for place, point in enumerate(points) if place in chosen or point in always]
