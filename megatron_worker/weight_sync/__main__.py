"""What weights can travel by on this machine: `python -m megatron_worker.weight_sync` prints a JSON object.

It has every transport, with null where it works, and otherwise the reason. Hosts ask before they start anything.
"""

import json
from typing import get_args

from shared.jobs.weight_sync import Transport


def reasons() -> dict[str, str | None]:
    try:
        import torch

        from megatron_worker.weight_sync.transports.table import why_not
    except ImportError as error:
        return dict.fromkeys(get_args(Transport), f"{type(error).__name__}: {error}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {name: why_not(name, device) for name in get_args(Transport)}


if __name__ == "__main__":
    print(json.dumps(reasons()))
