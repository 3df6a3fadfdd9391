"""The transports that work on this machine: `python -m megatron_worker.weight_sync` prints a JSON object.

It has every transport, with null if it works, and otherwise the reason; `external` only if it is given as an argument,
so that no package is loaded that an operator has not allowed. Hosts run it before they start anything.
"""

import json
import sys
from typing import get_args

from longshore.training import Transport


def reasons(external: bool) -> dict[str, str | None]:
    names = [name for name in get_args(Transport) if name != "external" or external]
    try:
        import torch

        from megatron_worker.weight_sync.transports.table import why_not
    except ImportError as error:
        return dict.fromkeys(names, f"{type(error).__name__}: {error}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {name: why_not(name, device) for name in names}


if __name__ == "__main__":
    print(json.dumps(reasons("external" in sys.argv[1:])))
