"""The transports that work on this machine: `python -m megatron_worker.weight_sync` prints a JSON object.

It has every transport, with null if it works, and otherwise the reason; experimental ones only if they are given as
arguments, so that no other packages are imported. Hosts run it before they start anything.
"""

import json
import sys
from collections.abc import Sequence
from typing import get_args

from shared.jobs.job import EXPERIMENTAL, Transport


def reasons(experimental: Sequence[str]) -> dict[str, str | None]:
    names = [name for name in get_args(Transport) if name not in EXPERIMENTAL or name in experimental]
    try:
        import torch

        from megatron_worker.weight_sync.transports.table import why_not
    except ImportError as error:
        return dict.fromkeys(names, f"{type(error).__name__}: {error}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {name: why_not(name, device) for name in names}


if __name__ == "__main__":
    print(json.dumps(reasons(sys.argv[1:])))
