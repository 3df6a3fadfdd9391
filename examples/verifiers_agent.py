"""Train on a task set of verifiers 0.4, unmodified: its harness plays, its rewards count (docs/agents.md).

    python -m examples.verifiers_agent TASKSET --model MODEL --policy NAME --steps 10

Needs an environment with `verifiers` and Longshore's client (`pip install verifiers==0.4.0 longshore`), and the task
set in it. Each attempt at a task has its own address. An attempt that ends with an error, or without a
reward, is made again, and never counts as 0. The options are those of examples/agent.py. Harnesses run on this machine,
unless `--runtime docker` says otherwise.
"""

import asyncio
import threading
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-not-found]  # it is installed beside Longshore's client alone
from verifiers.v1.utils.loaders import load_environment, resolve_env_config  # type: ignore[import-not-found]

from examples.agent import options, train


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("taskset", metavar="TASKSET", help="its id, as `vf-eval` takes it")
    parser.add_argument("--runtime", default="subprocess")
    parser.add_argument("--max-turns", type=int, default=8)
    given = parser.parse_args()
    agent = {"runtime": {"type": given.runtime}, "max_turns": given.max_turns}
    env = load_environment(resolve_env_config({"taskset": {"id": given.taskset}, "agent": agent}))
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def play(address: str, model: str, task: Any) -> float | None:
        client = vf.EvalClientConfig(base_url=f"{address}/v1", api_key_var="LONGSHORE_ANY_KEY")
        context = vf.ModelContext(client=client, model=model, sampling=vf.SamplingConfig())
        played = asyncio.run_coroutine_threadsafe(env.run_episode(task, context), loop).result()
        rewards = [reward for trace in played.traces for reward in trace.rewards.values()]
        if not played.ok or not rewards or None in rewards:
            print(f"an attempt broke: {[str(error)[:200] for error in played.errors]}", flush=True)
            return None
        return float(sum(trace.reward for trace in played.traces))

    async def serve() -> Any:
        return await env.serving().__aenter__()

    asyncio.run_coroutine_threadsafe(serve(), loop).result()
    train(play, list(env.taskset), given)


if __name__ == "__main__":
    main()
