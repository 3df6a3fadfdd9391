"""A task set of verifiers 0.4 for the tests, and a harness that needs no network: what a harness of theirs fetches, it
does with the standard library. Runs in the env server's process, with verifiers.
"""

import sys
from collections.abc import Iterator

import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig

PROGRAM = """
import json, sys, time, urllib.request

endpoint, secret, prompt, turns, fault = sys.argv[1:]
messages = [{"role": "user", "content": prompt}]
for turn in range(int(turns)):
    body = json.dumps({"model": "policy", "messages": messages, "temperature": 0.1}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {secret}"}
    answer = json.load(urllib.request.urlopen(urllib.request.Request(f"{endpoint}/chat/completions", body, headers)))
    messages.append(answer["choices"][0]["message"])
    messages.append({"role": "user", "content": f"And {turn}?"})
if fault == "hangs":
    time.sleep(600)
sys.exit(fault == "fails")
"""


class CrateData(vf.TaskData):
    turns: int = 3
    fault: str = ""


class CrateTask(vf.Task[CrateData]):
    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        if self.data.fault == "reward raises":
            raise ValueError("no rule for this answer")
        return float(
            sum(str(node.message.content).count("e") for node in trace.nodes if node.message.role == "assistant")
        )

    @vf.reward(weight=0.5)
    async def length(self, trace: vf.Trace) -> float:
        return 4.0

    @vf.metric
    async def turns_seen(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Crates(vf.Taskset[CrateTask]):
    def load(self) -> Iterator[CrateTask]:
        for number in range(2):
            yield CrateTask(CrateData(prompt=f"How many crates, {number}?"))


class Talks(vf.Harness[HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        words = [endpoint, secret, data.prompt, str(data.turns), data.fault]
        return await runtime.run_program([sys.executable, "-c", PROGRAM, *words], {})


__all__ = ["Crates", "Talks"]
