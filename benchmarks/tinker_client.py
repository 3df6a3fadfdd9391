"""Round trips of Tinker's own client, run as a separate process by other benchmarks. Prints JSON.

python -m benchmarks.tinker_client URL KEY MODEL TOKENS HOW_OFTEN
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import tinker  # type: ignore[import-not-found]  # installed for the tests: requirements/clients.txt
from tinker import types

_WARM_UP = 10


def main() -> None:
    url, key, model, tokens, how_often = sys.argv[1:6]
    service = tinker.ServiceClient(base_url=url, api_key=f"tml-{key}")
    made = service.create_lora_training_client(model, rank=8)
    client = made.result() if hasattr(made, "result") else made  # 0.25 waits for it by itself
    ids = list(range(3, 3 + int(tokens)))
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    data = [types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)]
    adam = types.AdamParams(learning_rate=1e-3)

    def passes() -> Any:
        return client.forward_backward(data, "cross_entropy")

    def step() -> Any:
        passes()
        return client.optim_step(adam)

    found = {"forward_backward": _times(int(how_often), passes), "and_step": _times(int(how_often), step)}
    if hasattr(service, "close"):  # which 0.25 does not have
        service.close("success").result()
    print(json.dumps(found))


def _times(how_often: int, send: Callable[[], Any]) -> list[float]:
    """Milliseconds from each call to its result."""
    found = []
    for _ in range(_WARM_UP + how_often):
        began = time.perf_counter()
        send().result()
        found.append(1000 * (time.perf_counter() - began))
    return found[_WARM_UP:]


if __name__ == "__main__":
    main()
