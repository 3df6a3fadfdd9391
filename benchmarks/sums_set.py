"""A task set of verifiers 0.4 for benchmarks/agent_learning.py: the sums of examples/program.py.

An env server imports it, in an environment with verifiers. The harness runs in its process, and asks up to three times.
"""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-not-found]
from openai import AsyncOpenAI  # type: ignore[import-not-found]
from verifiers.v1.configs.harness import HarnessConfig  # type: ignore[import-not-found]
from verifiers.v1.runtimes import ProgramResult  # type: ignore[import-not-found]

TRIES = 3


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        said = [str(node.message.content).strip() for node in trace.nodes if node.message.role == "assistant"]
        return 1.0 - said.index(self.data.answer) / TRIES if self.data.answer in said else 0.0


class Sums(vf.Taskset[SumTask]):
    def load(self) -> Iterator[SumTask]:
        yield SumTask(Sum(prompt="2 + 2 =", answer="4"))


class Asks(vf.Harness[HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Sum
    ) -> Any:
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(TRIES):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = answer.choices[0].message.content or ""
                if said.strip() == data.answer:
                    break
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "No. Again?"}]
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Asks", "Sums"]
