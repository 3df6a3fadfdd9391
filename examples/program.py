"""An agent as a program of a run: asks the policy, says if it is right, asks up to twice more (docs/agents.md).

    longshore submit rl -m MODEL --prompts rows.jsonl --agent 'python3 /opt/agents/program.py' --algorithm dr_grpo ...

It knows nothing of training: its address and question are in its environment. A row is `{"prompt": question,
"variables": {"ANSWER": answer}}`; with a `files` of this program, `python3 program.py` does. A right answer earns 1,
and less after each further try. It leaves the reward itself, as it lets the policy do nothing but answer.
"""

import json
import os
import urllib.request
from pathlib import Path

TRIES = 3
REWARD = Path("/logs/verifier/reward.txt")


def main() -> None:
    messages = [{"role": "user", "content": os.environ["PROMPT"]}]
    earned = 0.0
    for tries in range(TRIES):
        said = ask(messages)
        if said.strip() == os.environ["ANSWER"]:
            earned = 1.0 - tries / TRIES
            break
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "No. Again?"}]
    REWARD.parent.mkdir(parents=True, exist_ok=True)
    REWARD.write_text(str(earned))


def ask(messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": os.environ["MODEL"], "messages": messages}).encode()
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=3600) as answer:
        content = json.load(answer)["choices"][0]["message"]["content"]
    return str(content or "")


if __name__ == "__main__":
    main()
