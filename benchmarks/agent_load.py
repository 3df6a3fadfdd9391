"""Many agents at once: how long their turns take, what a turn costs beyond the sampler, and the stack's memory.

    python -m benchmarks.agent_load [--episodes 200] [--turns 20] [--program [--at-once 8]] [--out FILE.json]

Starts `longshore dev` in a temporary folder with a tiny model of random weights. First one agent plays alone, and the
sampler is asked directly for as many tokens: the difference is a turn's overhead. Then all are played at once,
each by a thread that asks again when it is refused (429), as clients do. With `--program`, a run plays them, 8 of each
prompt, by a program in a box for each, `--at-once` at a time (LONGSHORE_AGENTS__AT_ONCE). Prints JSON: seconds, and MB.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.control_plane import stack
from benchmarks.machine import provenance, tell
from benchmarks.rl_learning import Stack
from benchmarks.stack_processes import held_mb
from benchmarks.streamed_chat import sampler_of
from examples.tiny_model import make_tiny_model
from service.dev import Connection

_MODEL = "tiny/model"
_TOKENS, _GROUP = 16, 8
_PROGRAM = """
import json, os, time, urllib.request
messages, seconds, begin = [{"role": "user", "content": os.environ["PROMPT"]}], [], time.monotonic()
for number in range(int(os.environ["TURNS"])):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    began = time.perf_counter()
    said = json.load(urllib.request.urlopen(request, timeout=3600))["choices"][0]["message"]["content"]
    seconds.append(round(time.perf_counter() - began, 3))
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"And {number}?"}]
print(json.dumps([begin, time.monotonic(), *seconds]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--program", action="store_true")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "stack"
        model = make_tiny_model(Path(folder) / "model", ["how many crates are on the quay? seven crates."] * 8)
        if options.program:
            with stack(root, LONGSHORE_AGENTS__AT_ONCE=str(options.at_once)) as connection:
                result = _in_a_run(root, model, connection, options.episodes, options.turns)
            tell({"at_once": options.at_once, **result, **provenance()}, options.out)
            return
        with stack(root, LONGSHORE_TINKER__MODELS=json.dumps({_MODEL: str(model)})) as connection:
            headers = {"authorization": f"Bearer {connection.api_key}"}
            limits = httpx.Limits(max_connections=None)
            with httpx.Client(base_url=connection.api_url, headers=headers, timeout=600, limits=limits) as client:
                _play(client, 2)  # starts the sampler
                alone = _play(client, options.turns)
                direct = _direct(client, root, alone)
                before = held_mb(root)
                begin = time.perf_counter()
                with ThreadPoolExecutor(options.episodes) as threads:
                    played = list(threads.map(lambda _: _play(client, options.turns), range(options.episodes)))
                seconds = time.perf_counter() - begin
                after = held_mb(root)
    turns = sorted(turn["seconds"] for episode in played for turn in episode)
    result = {
        "what": f"{options.episodes} episodes of {options.turns} turns of {_TOKENS} tokens at once",
        "turn_alone_p50": round(statistics.median(turn["seconds"] for turn in alone), 4),
        "sampler_alone_p50": round(statistics.median(direct), 4),
        "overhead_p50": round(statistics.median(t["seconds"] - d for t, d in zip(alone, direct, strict=True)), 4),
        "all_seconds": round(seconds, 1),
        "turns_per_second": round(len(turns) / seconds, 1),
        "turn_p50": round(turns[len(turns) // 2], 2),
        "turn_p99": round(turns[int(len(turns) * 0.99)], 2),
        "refused_and_asked_again": sum(turn["again"] for episode in played for turn in episode),
        "continuing": sum(episode[-1]["end"]["num_continuing"] for episode in played),
        "later_turns": sum(episode[-1]["end"]["num_later_turns"] for episode in played),
        "memory_mb_before": before,
        "memory_mb_after": after,
        **provenance(),
    }
    tell(result, options.out)


def _play(client: httpx.Client, num_turns: int) -> list[dict[str, Any]]:
    """Play an episode to its end. Returns for each turn its seconds, and how often it was asked again."""
    sampling = {"max_tokens": _TOKENS}
    made = client.post("/api/v1/episodes", json={"model": _MODEL, "sampling": sampling}).raise_for_status().json()
    messages, turns = [{"role": "user", "content": "How many crates?"}], list[dict[str, Any]]()
    for number in range(num_turns):
        begin, again = time.perf_counter(), 0
        while True:
            question = {"model": _MODEL, "messages": messages}
            answer = client.post(f"{made['url']}/v1/chat/completions", json=question)
            if answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
                break
            again += 1
            time.sleep(float(answer.headers.get("retry-after", 1)))
        told = answer.raise_for_status().json()
        said = told["choices"][0]["message"]["content"]
        turns.append({"seconds": time.perf_counter() - begin, "again": again, "usage": told["usage"]})
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"And {number}?"}]
    ended = client.post(f"/api/v1/episodes/{made['episode_id']}/end").raise_for_status().json()
    turns[-1]["end"] = ended["end"]
    return turns


def _in_a_run(root: Path, model: Path, connection: Connection, num_episodes: int, num_turns: int) -> dict[str, Any]:
    """Have a run play the episodes. `peak_mb`: of all processes of the stack, boxes and their programs among them."""
    rows, own = root.parent / "rows.jsonl", {"files": {"agent.py": _PROGRAM}, "variables": {"TURNS": str(num_turns)}}
    numbers = range(-(-num_episodes // _GROUP))
    rows.write_text("".join(json.dumps({"prompt": f"How many crates, {n}?"} | own) + "\n" for n in numbers))
    options = ["--model", str(model), "--prompts", str(rows), "--agent", "python3 agent.py", "-n", str(_GROUP)]
    options += ["--max-tokens", "4096", "--max-completion-tokens", str(_TOKENS)]
    options += ["--agent-verifier", "echo 1 > /logs/verifier/reward.txt"]
    on, peak_mb, is_over = Stack(root), [0.0], threading.Event()

    def watch() -> None:
        while not is_over.wait(2.0):
            held = 0.0
            for process in psutil.Process(connection.pid).children(recursive=True):
                with suppress(psutil.Error):
                    held += process.memory_full_info().pss / 1e6
            peak_mb[0] = max(peak_mb[0], round(held, 1))

    watching = threading.Thread(target=watch)
    watching.start()
    began, before = time.perf_counter(), held_mb(root)
    ended = on.run("rollout", *options, "--json")
    seconds, after = time.perf_counter() - began, held_mb(root)
    is_over.set()
    watching.join()
    shown: Any = on.run("episodes", ended["run_id"], "--of", "eval", "--json", "--limit", "256")
    played = [json.loads(one["episode"]["output"]) for one in shown if one["episode"]["end"] == "completed"]
    turns = sorted(second for _, _, *seconds_of in played for second in seconds_of)
    playing = max(end for _, end, *_ in played) - min(begin for begin, *_ in played)
    return {
        "what": f"{len(shown)} episodes of {num_turns} turns of {_TOKENS} tokens, of programs in boxes",
        "completed": len(played),
        "all_seconds": round(seconds, 1),
        "playing_seconds": round(playing, 1),
        "turns_per_second": round(len(turns) / playing, 1),
        "turn_p50": round(turns[len(turns) // 2], 3),
        "turn_p99": round(turns[int(len(turns) * 0.99)], 3),
        "kept_share": ended["metrics"]["eval_episode_kept_share"],
        "memory_mb_before": before,
        "memory_mb_after": after,
        "peak_mb": peak_mb[0],
    }


def _direct(client: httpx.Client, root: Path, turns: list[dict[str, Any]]) -> list[float]:
    """Seconds of the sampler for as many tokens as each turn had."""
    found = []
    with sampler_of(root) as (sampler, model):
        for turn in turns:
            asked: dict[str, Any] = {"model": model, "prompt": [5] * turn["usage"]["prompt_tokens"]}
            asked |= {"max_tokens": turn["usage"]["completion_tokens"], "ignore_eos": True, "logprobs": 0}
            begin = time.perf_counter()
            sampler.post("/v1/completions", json=asked | {"return_token_ids": True}).raise_for_status()
            found.append(time.perf_counter() - begin)
    return found


if __name__ == "__main__":
    main()
