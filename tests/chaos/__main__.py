"""Seven kinds of runs at once, and everything under them killed and stopped at random: does one bit change?

    python -m tests.chaos [--kills 200] [--minutes 60] [--size 2] [--seed N]

Each round submits the seven runs; rounds follow each other until so much has happened, or the time is up. What they
publish is held against the same runs on the same stack before anything happened. The last line says how it ended; the
status is 1 where a run did not succeed, or its weights are others.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests import conftest  # noqa: F401  (nothing reaches a real account)
from tests.chaos.trial import Trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="what happens in all, stops included")
    parser.add_argument("--minutes", type=float, default=60, help="after which no further round begins")
    parser.add_argument("--size", type=int, default=2, help="of the runs: 1 is the smallest")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder), random.Random(options.seed), options.kills, options.size)
        with trial.begun():
            while not trial.disturber.is_spent and time.monotonic() < deadline:
                trial.round()
    for what, count in sorted(trial.disturber.told.items()):
        print(f"{count:5d} {what}")
    print(f"{trial.num_rounds} rounds, {trial.num_equal} runs with equal weights; seed {options.seed}")
    for what in trial.wrong:
        print(what)
    sys.exit(bool(trial.wrong))


if __name__ == "__main__":
    main()
