"""Write a task set of verifiers 0.4 as rows of prompts, and serve it to runs of Longshore, unmodified (docs/agents.md).

    python verifiers_server.py rows TASKSET > rows.jsonl
    python verifiers_server.py serve TASKSET --address tcp://127.0.0.1:5000
    longshore submit rl -m MODEL --prompts rows.jsonl --agent-server NAME --group-size 8 --steps 10

Needs an environment with `verifiers` alone (`pip install verifiers==0.4.0 uv`), and the task set in it. The operator
names the server: LONGSHORE_AGENTS__SERVERS='{"NAME": "tcp://127.0.0.1:5000"}'. Agents of a task set run on this
machine, by the harness `null`, unless `--env` says otherwise: `--env '{"agent": {"runtime": {"type": "docker"}}}'`.
"""

import argparse
import json
import logging
from typing import Any

from verifiers.v1.serve import serve_env  # type: ignore[import-not-found]
from verifiers.v1.utils.loaders import (  # type: ignore[import-not-found]
    env_config_type,
    load_taskset,
    resolve_env_config,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rows", "serve"))
    parser.add_argument("taskset", help="its id, as `vf-eval` takes it")
    parser.add_argument("--address", default="tcp://127.0.0.1:5000")
    parser.add_argument("--max-turns", type=int, default=16, help="of an episode; it is scored then")
    parser.add_argument("--at-once", type=int, help="most episodes at once")
    parser.add_argument("--env", type=json.loads, default={}, help="the env's configuration, as JSON")
    parser.add_argument("--most", type=int, default=10_000, help="most rows, as a task set may have no end")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    own: dict[str, Any] = {"taskset": {"id": given.taskset}}
    if "agent" in env_config_type(given.taskset, given.env.get("id", "")).model_fields:  # else it has seats of its own
        own["agent"] = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": given.max_turns}
    config = resolve_env_config(_merged(own, given.env))
    if given.what == "serve":
        serve_env(max_workers=1, address=given.address, config=config, max_concurrent=given.at_once)
        return
    for task in load_taskset(config.taskset).take(given.most):
        data = task.data.model_dump(mode="json")
        prompt = task.data.prompt_text or task.data.description or task.data.name or f"task {task.data.idx}"
        print(json.dumps({"prompt": prompt, "task_data": data}))


def _merged(default: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with what is given in the place of its defaults."""
    both = {name: _merged(default[name], value) for name, value in given.items() if isinstance(default.get(name), dict)}
    return default | given | both


if __name__ == "__main__":
    main()
