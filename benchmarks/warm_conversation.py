"""A conversation of many turns with a sampler that keeps prompts: tokens computed again a turn, and the time.

    python -m benchmarks.warm_conversation [--families qwen3 qwen3_5 gpt_oss] [--turns 20] [--out FILE.json]

One sampler process with the room that it has by default, and one without any, are asked the same turns in turn, over
HTTP. A turn's prompt is the former prompt, the answer that was drawn, and 100 new tokens, as of a tool. Answers have 50
tokens. By family: the most tokens of a turn's prompt that were computed beyond those behind the former prompt (the
bound is one block, of 256), the tokens computed in all, and the time and the CPU time of the warm process as shares of
the other's. All answers are compared: they are equal to the bit.
"""

import argparse
import itertools
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from activities.sampling.client import Completion
from benchmarks.machine import provenance, tell
from benchmarks.sampler import Ours, make_model
from shared.chat.completions import Sampling
from shared.families import FAMILIES

FIRST, NUM_NEW, NUM_DRAWN = 200, 100, 50
SAMPLING = Sampling(max_tokens=NUM_DRAWN, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", choices=FAMILIES, nargs="+", default=["qwen3", "qwen3_5", "gpt_oss"])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    by_family = {family: measure(family, arguments.turns) for family in arguments.families}
    result = {"benchmark": "warm conversation", "turns": arguments.turns, **by_family, **provenance()}
    tell(result, arguments.out)


def measure(family: str, num_turns: int) -> dict[str, Any]:
    with ExitStack() as stack:
        model = make_model(Path(stack.enter_context(tempfile.TemporaryDirectory())), family, 256)
        samplers = [Ours(model, 1, stack, "--kept-bytes", size) for size in (str(1 << 30), "0")]
        prompt = tuple(7 * i % 250 + 3 for i in range(FIRST))
        spent, most_again, length = [[0.0, 0.0], [0.0, 0.0]], 0, len(prompt)
        computed = [each.memory().prompt_tokens_computed for each in samplers]
        for turn in range(num_turns):
            answers = list[Completion]()
            for which, each in enumerate(samplers):
                began, cpu = time.perf_counter(), each.cpu_s()
                answers += each.sample(prompt, SAMPLING, turn)
                spent[which][0] += time.perf_counter() - began
                spent[which][1] += each.cpu_s() - cpu
            assert answers[0] == answers[1]
            before, computed = computed, [each.memory().prompt_tokens_computed for each in samplers]
            assert computed[1] - before[1] == len(prompt)
            if turn:
                most_again = max(most_again, computed[0] - before[0] - (len(prompt) - length))
            length = len(prompt)
            news = (11 * turn + 13 * i for i in itertools.count())
            prompt = (*prompt, *answers[0].token_ids, *(next(news) % 250 + 3 for _ in range(NUM_NEW)))
    return {
        "most_computed_again_in_a_turn": most_again,
        "computed_tokens": computed[0],
        "computed_tokens_cold": computed[1],
        "time_share": round(spent[0][0] / spent[1][0], 3),
        "cpu_share": round(spent[0][1] / spent[1][1], 3),
    }


if __name__ == "__main__":
    main()
