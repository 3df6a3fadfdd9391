"""A session with ART's client of 0.5.20 and later: trains on messages, and on what it captured. Tells JSON.

python -m tests.end_to_end.art_newer_session URL KEY MODEL FOLDER
"""

import asyncio
import json
import sys
from typing import Any

import art

QUESTION: Any = {"role": "user", "content": "How many crates are on quay 3?"}
AGAIN: Any = {"role": "user", "content": "Are you sure?"}
GROUP = 4


async def ask(model: Any, messages: list[Any], number: int) -> Any:
    """One answer. The client asks for log-probabilities where it wants them; token ids it asks for by itself."""
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=8, temperature=1.0, seed=number, logprobs=True
    )
    return completion.choices[0]


async def written(model: Any, number: int) -> Any:
    """A trajectory that the rollout puts together."""
    choice = await ask(model, [QUESTION], number)
    return art.Trajectory(messages_and_choices=[QUESTION, choice], reward=float(number))


async def captured(model: Any, number: int) -> Any:
    """A trajectory that the client makes of the requests and answers of two turns."""
    with art.Trajectory(reward=float(number)) as trajectory:
        first = await ask(model, [QUESTION], number)
        said: Any = {"role": "assistant", "content": first.message.content}
        await ask(model, [QUESTION, said, AGAIN], number)
    return trajectory


async def session(url: str, key: str, base: str, folder: str) -> dict[str, Any]:
    backend = art.ServerlessBackend(api_key=key, base_url=f"{url}/v1")
    names: Any = {"name": "Newer", "run_name": "newer-1", "project": "harbour"}
    model: Any = art.TrainableModel(**names, base_model=base, base_path=folder)
    await model.register(backend)
    told: dict[str, Any] = {"results": []}
    for rollout in (written, captured):
        group = art.TrajectoryGroup([await rollout(model, number) for number in range(GROUP)])
        result = await backend.train(model, [group])
        told["results"].append({"step": result.step, "metrics": result.metrics})
    told["token"] = (await ask(model, [QUESTION], 1)).logprobs.content[0].token
    answered = [QUESTION, {"role": "assistant", "content": "21 crates."}]
    examples = [art.Trajectory(messages_and_choices=[*answered, AGAIN, *answered[1:]], reward=0.0) for _ in range(4)]
    await model.train_sft(examples, art.TrainSFTConfig(learning_rate=1e-3, assistant_turns="last"))
    told["taught"] = await model.get_step()
    try:
        await backend.train(model, [group], kl_penalty_coef=0.1)
    except Exception as error:
        told["refused"] = str(error)
    await backend.delete(model)
    return told


def main() -> None:
    url, key, base, folder = sys.argv[1:]
    print(json.dumps(asyncio.run(session(url, key, base, folder)), default=str))


if __name__ == "__main__":
    main()
