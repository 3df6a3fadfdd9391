"""Data that tests send through Tinker's client, and that a job of ours trains on: the same for the same numbers."""

import random

PROMPT, ANSWER, BATCH = 3, 8, 4


def batches(how_many: int) -> list[list[list[int]]]:
    """Batches of four sequences of eleven ids, of which the last eight are trained on."""
    rng = random.Random(15)
    return [[[rng.randrange(3, 500) for _ in range(PROMPT + ANSWER)] for _ in range(BATCH)] for _ in range(how_many)]


def weights_of(ids: list[int]) -> list[float]:
    """The weight of each token but the first."""
    return [0.0] * (PROMPT - 1) + [1.0] * (len(ids) - PROMPT)
