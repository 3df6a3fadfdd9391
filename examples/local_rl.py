"""A run that makes its own rollouts, in this process, without a server: `python examples/local_rl.py RUN.json FOLDER`.

RUN.json is an `RLRun` with `rollouts`, as the API takes it. Prints one line of JSON per step; step 0 is the policy
before the first, on held-out prompts. At the end it prints the folder of the adapter (docs/local.md). The same command
again continues.
"""

import argparse
import json
from pathlib import Path

from longshore import RLRun
from longshore.local import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN.json")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where results and caches are kept")
    parser.add_argument("--threads", type=int, help="CPU threads of a rank, which decide the bits")
    given = parser.parse_args()
    run = RLRun.model_validate_json(given.run.read_bytes())
    status = train(run, given.folder, on_metrics=show, threads=given.threads)
    print(status.adapter)


def show(step: int, metrics: dict[str, float]) -> None:
    print(json.dumps({"step": step, "metrics": metrics}), flush=True)


if __name__ == "__main__":
    main()
