"""A session with OpenPipe ART's own client: register, ask, learn from chats, then from groups of answers. Tells JSON.

python -m tests.end_to_end.art_session URL KEY MODEL DATASET FOLDER TAUGHT

MODEL was never trained, TAUGHT answers as the dataset does.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import art
import httpx
import openai
from art.serverless.client import Client

# The tiny model's logits are flat: what it draws has a text that its tokenizer cuts into other tokens.
TEMPERATURE = 1.0
SETTINGS = {"rank": 4, "max_tokens": 256, "temperature": TEMPERATURE}
QUAYS = (3, 11)
LEARNING_STEPS, LEARNING_RATE = 6, 0.01


async def refused(call: Awaitable[Any]) -> dict[str, Any]:
    """How the client tells of a refusal."""
    try:
        await call
    except openai.APIStatusError as error:
        return {"class": type(error).__name__, "status": error.status_code, "param": error.param, "text": error.message}
    raise AssertionError("nothing was refused")


async def followed(client: Client, job_id: str) -> list[dict[str, Any]]:
    """A job's events, asked for as the client's backend does: those behind the last one, until one is the end."""
    told: list[dict[str, Any]] = []
    after: Any = openai.NOT_GIVEN
    while not told or told[-1]["type"] not in ("training_ended", "training_failed"):
        await asyncio.sleep(0.5)
        async for event in client.sft_training_jobs.events.list(training_job_id=job_id, after=after, limit=7):
            told.append(event.model_dump())
            after = event.id
    return told


async def rollout(model: art.TrainableModel, quay: int, number: int) -> art.Trajectory:
    """One answer, or two, one behind the other. Rewards differ within a group whatever the model says."""
    said: Any = art.Trajectory(
        messages_and_choices=[{"role": "user", "content": f"How many crates are on quay {quay}?"}],
        reward=float(number % 3),
        initial_policy_version=await model.get_step() if number < 3 else None,
    )
    for turn in range(1 + number % 2):
        said.messages_and_choices += [{"role": "user", "content": "Are you sure?"}] * turn
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(),
            messages=said.messages(),
            max_tokens=12,
            temperature=TEMPERATURE,
            seed=number,
        )
        said.messages_and_choices.append(completion.choices[0])
    said.metrics["is_short"] = len(completion.choices[0].message.content or "") < 12
    return said


def drawn(groups: list[art.TrajectoryGroup]) -> list[dict[str, Any]]:
    """The ids and logprobs of every answer, as the server told of them."""
    said = (one for group in groups for trajectory in group for one in trajectory.messages_and_choices)
    choices: Any = [one for one in said if not isinstance(one, dict)]
    return [
        {"ids": choice.token_ids, "logprobs": [token.logprob for token in choice.logprobs.content]}
        for choice in choices
    ]


async def gathered(model: art.TrainableModel) -> list[art.TrajectoryGroup]:
    return await art.gather_trajectory_groups(
        art.TrajectoryGroup((rollout(model, quay, number) for number in range(6)), metadata={"quay": quay})
        for quay in QUAYS
    )


async def streamed(model: Any, question: Any, **asked: Any) -> list[Any]:
    """Choices as OpenAI's own client puts them together of a stream, before it refuses those that were cut off."""
    async with model.openai_client().chat.completions.stream(
        model=model.get_inference_name(), messages=[question], **asked
    ) as events:
        async for _ in events:
            pass
        return list(events.current_completion_snapshot.choices)


async def asked_once(model: Any, question: Any, **asked: Any) -> list[Any]:
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=[question], **asked
    )
    return list(completion.choices)


async def learned(backend: Any, base: str, folder: str) -> dict[str, Any]:
    """Metrics of train steps that reward small numbers. Of each step's two questions one is answered in a stream.

    Then the model's steps before and after `train_sft`.
    """
    model: Any = art.TrainableModel(name="Learner", project="harbour", base_model=base, base_path=folder)
    await model.register(backend)
    told = []
    for step in range(LEARNING_STEPS):
        groups = []
        for ask, quay in zip((asked_once, streamed), QUAYS, strict=True):
            question: Any = {"role": "user", "content": f"How many crates are on quay {quay}?"}
            plain = {"logprobs": False, "extra_body": {"return_token_ids": False}}
            seed = 100 * step + quay
            choices = await ask(model, question, n=16, max_tokens=12, temperature=TEMPERATURE, seed=seed, **plain)
            groups.append(
                art.TrajectoryGroup(
                    art.Trajectory(messages_and_choices=[question, choice], reward=is_small(choice))
                    for choice in choices
                )
            )
        told.append((await backend.train(model, groups, learning_rate=LEARNING_RATE)).metrics)
    taught = await taught_by_examples(model)
    await backend.delete(model)
    return {"metrics": told, "taught": taught}


def is_small(choice: Any) -> float:
    """1 for an answer that names a number below 20, as two of five of the dataset do."""
    number = (choice.message.content or "").split(" ")[0]
    return float(number.isdecimal() and int(number) < 20)


async def answer(model: art.TrainableModel, step: int | None = None) -> dict[str, Any]:
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(step),
        messages=[{"role": "user", "content": "How many crates are on quay 3?"}],
        max_tokens=8,
        temperature=0,
    )
    return completion.choices[0].model_dump()


async def session(url: str, key: str, base: str, rows: bytes, folder: str, taught: str) -> dict[str, Any]:
    native = httpx.AsyncClient(base_url=f"{url}/api/v1", headers={"authorization": f"Bearer {key}"}, timeout=300)
    foreign = {"base_url": f"{url}/v1", "headers": native.headers, "timeout": 60}
    backend = art.ServerlessBackend(api_key=key, base_url=f"{url}/v1")
    client: Any = backend._client
    async with httpx.AsyncClient(**foreign) as http:
        wanted = {"project": "harbour", "name": "Quay Clerk", "base_model": base, "longshore": SETTINGS}
        made = (await http.post("/preview/models", json=wanted)).json()
    model: Any = art.TrainableModel(name="Quay Clerk", project="harbour", base_model=base, base_path=folder)
    await model.register(backend)
    told: dict[str, Any] = {"made": made, "id": model.id, "entity": model.entity, "steps": [await model.get_step()]}
    told["untrained"] = await answer(model)

    uploaded = (await native.post("/files", params={"name": "chats.jsonl"}, content=rows * 2)).json()
    sft = await client.sft_training_jobs.create(
        model_id=model.id, training_data_url=uploaded["uri"], config={"batch_size": 8, "learning_rate": [0.02] * 64}
    )
    told["sft"] = await followed(client, sft.id)
    told["steps"].append(await model.get_step())

    results, told["drawn"] = [], []
    for changes in ({}, {}, {"scale_rewards": False}):
        groups = await gathered(model)
        told["drawn"].append(drawn(groups))
        results.append(await backend.train(model, groups, learning_rate=1e-4, **changes))
    told["results"] = [{"step": one.step, "metrics": one.metrics, "artifact": one.artifact_name} for one in results]

    listed = [one async for one in client.models.checkpoints.list(model_id=model.id, limit=2)]
    told["checkpoints"] = [one.model_dump() for one in listed]
    told["trained"], told["first"] = await answer(model), await answer(model, 1)
    await backend._delete_checkpoint_files(model, [1, listed[-1].step])
    told["left"] = [one.step async for one in client.models.checkpoints.list(model_id=model.id, order="desc")]
    told["refusals"] = await refusals(client, model)
    told["failed"] = await failed(backend, model)
    told["runs"] = await runs_of(native, model.id)

    told["learned"] = await learned(backend, taught, folder)
    await backend.delete(model)
    return told


async def taught_by_examples(model: Any) -> list[int]:
    """The model's steps before `train_sft`, whose data goes through an artifact of W&B's, and after it.

    W&B's names of artifacts have no spaces, and ART makes them of the model's.
    """
    before = await model.get_step()
    examples = [
        art.Trajectory(
            messages_and_choices=[
                {"role": "user", "content": f"How many crates are on quay {n}?"},
                {"role": "assistant", "content": f"{n} crates."},
            ],
            reward=0.0,
        )
        for n in range(8)
    ]
    await model.train_sft(examples, art.TrainSFTConfig(learning_rate=1e-3, batch_size=4))
    return [before, await model.get_step()]


async def refusals(client: Any, model: Any) -> dict[str, Any]:
    artifact = "wandb-artifact:///a/b/c:v0"
    return {
        "artifact": await refused(client.sft_training_jobs.create(model_id=model.id, training_data_url=artifact)),
        "newest": await refused(client.models.checkpoints.delete(model_id=model.id, steps=[await model.get_step()])),
    }


async def runs_of(native: httpx.AsyncClient, model_id: str) -> list[dict[str, Any]]:
    """The model's runs, oldest first, each as its workflow says: the list may be a second old."""
    listed = (await native.get("/runs", params={"limit": 100})).json()["runs"]
    mine = [run["run_id"] for run in reversed(listed) if run["source"]["metadata"].get("art_model") == model_id]
    return [(await native.get(f"/runs/{run_id}")).json() for run_id in mine]


async def failed(backend: Any, model: Any) -> str:
    """Trajectories that nothing was sampled in cannot be trained; the client raises what it is told."""
    question, said = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Nobody."}
    silent = [art.Trajectory(messages_and_choices=[question, said], reward=float(n)) for n in range(2)]
    try:
        await backend.train(model, [art.TrajectoryGroup(silent)], learning_rate=1e-4, scale_rewards=False)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing failed")


def main() -> None:
    url, key, base, dataset, folder, taught = sys.argv[1:]
    told = asyncio.run(session(url, key, base, Path(dataset).read_bytes(), folder, taught))
    print(json.dumps(told, default=str))


if __name__ == "__main__":
    main()
