"""A program for vLLM's own Python: what it scores a text's tokens with, by one model after another, and their adapters.

Each line of its input is a request, each line that it appends to the file that is its argument an answer: the
log-probabilities of all ids but the first, in nats, by the model and by each adapter; or what went wrong. An engine is
let go before the next one begins.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest


def scored(model: str, dtype: str, ids: list[int], adapters: list[str], custom_ops: list[str]) -> dict[str, Any]:
    with_lora = {"enable_lora": True, "max_lora_rank": 8} if adapters else {}
    sizes: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 2, "seed": 0, "dtype": dtype}
    how: dict[str, Any] = {"load_format": "safetensors", "compilation_config": {"custom_ops": custom_ops}}
    engine = LLM(model, enforce_eager=True, **how, **sizes, **with_lora)
    try:
        requests = [None, *(LoRARequest(each, number + 1, each) for number, each in enumerate(adapters))]
        return {"logprobs": [_logprobs(engine, ids, each) for each in requests]}
    finally:
        del engine
        cleanup_dist_env_and_memory()
        gc.collect()


def _logprobs(engine: LLM, ids: list[int], adapter: LoRARequest | None) -> list[float]:
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (answer,) = engine.generate([{"prompt_token_ids": ids}], asked, lora_request=adapter, use_tqdm=False)
    return [at[token].logprob for at, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)]


def main() -> None:
    for line in sys.stdin:
        try:
            answer = scored(**json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        with Path(sys.argv[1]).open("a") as file:
            file.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
