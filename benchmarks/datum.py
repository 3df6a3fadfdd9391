"""Cost of a Tinker datum from its request's body to the answer, without the passes, in CPU time.

    python -m benchmarks.datum [--data 64] [--tokens 512] [--loss cross_entropy]

Makes one request and processes it in this process like the stack: the web service's child writes the command's file,
each rank makes batches of it, the first rank writes the result, and another child writes the answer. Prints JSON:
milliseconds of each, the median of some tries, and bytes.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.machine import provenance
from longshore.commands import CommandResult
from megatron_worker.training.batches import CommandData, pack_data
from service.apis.tinker import translation
from service.apis.tinker.wire import MESSAGES
from shared.jobs.commands import check_data, read_command

T = TypeVar("T")
_VOCAB_SIZE = 150_000
_TRIES = 9
_FLOAT32, _INT64 = 1, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--loss", choices=("cross_entropy", "importance_sampling"), default="importance_sampling")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sent, file, answer = (Path(folder) / name for name in ("sent", "command", "answer"))
        sent.write_bytes(_body(asked.data, asked.tokens, asked.loss))
        door_ms, detail = _timed(lambda: translation.make_command(str(sent), "", str(file)))
        rank_ms, packed = _timed(lambda: _packed(file.read_bytes(), asked.tokens + 1))
        result_ms, result = _timed(lambda: _result(packed))
        read_ms, read = _timed(lambda: CommandResult.model_validate_json(result))
        answer_ms, _ = _timed(lambda: translation.write_scores(str(file), detail, read, str(answer)))
        num_bytes = {"sent": sent.stat().st_size, "command": file.stat().st_size, "result": len(result)}
        num_bytes["answer"] = answer.stat().st_size
    found = {
        "what": "processor milliseconds of one request, without its passes",
        **vars(asked),
        "ms": {"door": door_ms, "rank": rank_ms, "result": result_ms, "result_read": read_ms, "answer": answer_ms},
        "bytes": num_bytes,
        **provenance(),
    }
    print(json.dumps(found, indent=1))


def _body(num_data: int, num_tokens: int, loss: str) -> bytes:
    random = np.random.default_rng(0)
    message = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn=loss)
    for _ in range(num_data):
        ids, datum = random.integers(0, _VOCAB_SIZE, num_tokens + 1), message.data.add()
        datum.model_input.add().encoded_text.tokens = ids[:-1].astype("<i4").tobytes()
        _put(datum, "target_tokens", ids[1:], _INT64)
        if loss == "cross_entropy":
            _put(datum, "weights", np.arange(num_tokens) > num_tokens // 2, _FLOAT32)
        else:
            _put(datum, "logprobs", -random.random(num_tokens), _FLOAT32)
            _put(datum, "advantages", np.full(num_tokens, random.normal()), _FLOAT32)
    return bytes(message.SerializeToString())


def _put(datum: Any, name: str, values: Any, dtype: int) -> None:
    dense = values.astype("<f4" if dtype == _FLOAT32 else "<i8").tobytes()
    tensor = MESSAGES["Tensor"](dense=dense, dtype=dtype, shape=[len(values)])
    datum.loss_fn_inputs.add(key=name, value=tensor)


def _packed(command: bytes, max_tokens: int) -> CommandData:
    _, units = read_command(command)
    assert units is not None
    check_data(units, _VOCAB_SIZE, max_tokens)
    return pack_data(units, max_tokens, share_prefixes=False)


def _result(packed: CommandData) -> bytes:
    logprobs = -np.random.default_rng(1).random(packed.batches.units.header.num_targets, dtype=np.float32)
    scores = packed.scores({"logprobs": logprobs})
    return CommandResult(number=1, kind="forward_backward", data=scores).model_dump_json().encode()


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    times = []
    for _ in range(_TRIES):
        began = time.process_time()
        done = work()
        times.append(1000 * (time.process_time() - began))
    return round(statistics.median(times), 2), done


if __name__ == "__main__":
    main()
