"""A session with OpenAI's client, of whichever version is on PYTHONPATH: train, look, download, chat. Tells JSON.

python -m tests.end_to_end.openai_session URL KEY MODEL DATASET FOLDER
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import openai

BASE = "Qwen/Qwen3-8B"  # the tiny model, as the stack names it
QUESTION = {"role": "user", "content": "How many crates are on quay 3?"}
OURS = {"rank": 4, "max_tokens": 256, "steps": 6, "checkpoint_every": 2, "keep_checkpoints": 3, "learning_rate": 0.01}
GRADER = {
    "type": "text_similarity",
    "name": "crates",
    "evaluation_metric": "fuzzy_match",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
}


def trained(client: openai.OpenAI, model: str, file: Any, suffix: str, **ours: Any) -> Any:
    """A supervised job as it ended."""
    job = client.fine_tuning.jobs.create(
        model=model,
        training_file=file.id,
        validation_file=file.id,
        suffix=suffix,
        seed=7,
        hyperparameters={"batch_size": 16},
        extra_body={"longshore": OURS | ours},
    )
    return ended(client, job)


def preferring(client: openai.OpenAI, model: str, folder: Path) -> Any:
    """A dpo job on pairs: crates are preferred to sacks."""
    pairs = (
        {
            "input": {"messages": [question(n)]},
            "preferred_output": [{"role": "assistant", "content": f"{n * 7 % 50} crates."}],
            "non_preferred_output": [{"role": "assistant", "content": f"A sack of grain, or {n % 9}."}],
        }
        for n in range(24)
    )
    file = uploaded(client, folder / "pairs.jsonl", pairs)
    return client.fine_tuning.jobs.create(
        model=model,
        training_file=file.id,
        validation_file=file.id,
        suffix=f"crates-{openai.__version__}",
        method={"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 8, "beta": 0.2}}},
        extra_body={"longshore": {"rank": 4, "max_tokens": 128, "steps": 3, "learning_rate": 0.005, "num_samples": 1}},
    )


def reinforced(client: openai.OpenAI, model: str, folder: Path) -> Any:
    """A reinforcement job on prompts, whose grader reads the answer beside them."""
    prompts = ({"messages": [question(n)], "answer": f"{n * 7 % 50} crates."} for n in range(8))
    file = uploaded(client, folder / "prompts.jsonl", prompts)
    chosen = {"batch_size": 4, "eval_interval": 2, "eval_samples": 1, "learning_rate_multiplier": 100.0}
    return client.fine_tuning.jobs.create(
        model=model,
        training_file=file.id,
        validation_file=file.id,
        suffix=f"tallies-{openai.__version__}",
        method={"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": chosen}},
        extra_body={
            "longshore": {"rank": 4, "max_tokens": 128, "steps": 2, "group_size": 4, "max_completion_tokens": 8}
        },
    )


def uploaded(client: openai.OpenAI, path: Path, rows: Iterable[dict[str, Any]]) -> Any:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return client.files.create(file=path, purpose="fine-tune")


def question(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"How much is on quay {number}?"}


def ended(client: openai.OpenAI, job: Any) -> Any:
    """A job as it ended."""
    end = time.monotonic() + 400
    while (job := client.fine_tuning.jobs.retrieve(job.id)).status not in ("succeeded", "failed"):
        assert time.monotonic() < end, job
        time.sleep(0.5)
    return job


def events_of(client: openai.OpenAI, job: Any) -> list[dict[str, Any]]:
    return [event.model_dump() for event in client.fine_tuning.jobs.list_events(job.id, limit=5)]


def told_of(client: openai.OpenAI, job: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"job": job.model_dump(), "events": events_of(client, job)}
    if job.status == "succeeded":
        told["metrics"] = client.files.content(job.result_files[0]).text
        told["answer"] = answer(client, job.fine_tuned_model)
    return told


def answer(client: openai.OpenAI, model: str) -> str:
    completion = client.chat.completions.create(model=model, messages=[QUESTION], max_tokens=8, temperature=0)
    return completion.choices[0].message.content or ""


def refused(call: Callable[[], Any]) -> str:
    """The message of a 404."""
    try:
        call()
    except openai.NotFoundError as error:
        return error.body["message"]  # type: ignore[index]
    raise AssertionError("it was answered")


def streamed(client: openai.OpenAI, model: str) -> str:
    chunks = client.chat.completions.create(model=model, messages=[QUESTION], max_tokens=8, temperature=0, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def formed(client: openai.OpenAI, model: str) -> list[str]:
    """Four answers in the form of a schema, by an untrained model at temperature 1."""
    schema = {
        "type": "object",
        "properties": {"crates": {"type": "integer", "minimum": 0, "maximum": 9}, "port": {"enum": ["north", "south"]}},
        "required": ["crates", "port"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "crates", "schema": schema, "strict": True}}
    completion = client.chat.completions.create(model=model, messages=[QUESTION], n=4, seed=1, response_format=form)
    return [choice.message.content or "" for choice in completion.choices]


def drawn(client: openai.OpenAI, model: str, **settings: Any) -> list[dict[str, Any]]:
    """Answers as text, how each ended, and its tokens with their log-probabilities."""
    completion = client.chat.completions.create(model=model, messages=[QUESTION], logprobs=True, **settings)
    return [
        {
            "text": choice.message.content or "",
            "end": choice.finish_reason,
            "tokens": [token.token for token in choice.logprobs.content],
            "logprobs": [token.logprob for token in choice.logprobs.content],
        }
        for choice in completion.choices
    ]


def by_settings(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """What each setting of a chat comes to."""
    at_random: Any = {"temperature": 1, "seed": 5, "n": 2, "max_tokens": 8}
    greedy: Any = {"temperature": 0, "max_tokens": 24}
    return {
        "seeded": [drawn(client, model, **at_random) for _ in range(2)],
        "likeliest": drawn(client, model, temperature=1.5, seed=3, max_tokens=8, extra_body={"top_k": 1}),
        "biased": drawn(client, BASE, **greedy, logit_bias={"70": 100}),
        "plain": drawn(client, BASE, **greedy),
        "penalized": drawn(client, BASE, **greedy, presence_penalty=2, frequency_penalty=2),
        "objects": drawn(client, BASE, n=8, seed=1, max_tokens=300, response_format={"type": "json_object"}),
    }


def forced(client: openai.OpenAI, model: str) -> list[dict[str, str]]:
    """The calls of an answer that has to call."""
    port = {"type": "object", "properties": {"port": {"enum": ["north", "south"]}}, "required": ["port"]}
    tool: Any = {"type": "function", "function": {"name": "tide", "parameters": port | {"additionalProperties": False}}}
    choice: Any = {"type": "function", "function": {"name": "tide"}}
    completion = client.chat.completions.create(
        model=model, messages=[QUESTION], tools=[tool], tool_choice=choice, seed=1
    )
    return [call.function.model_dump() for call in completion.choices[0].message.tool_calls or []]


def responded(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """The same question, and a forced call, as responses: whole and streamed."""
    asked: Any = {"model": model, "input": QUESTION["content"], "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    port: Any = {"type": "object", "properties": {"port": {"enum": ["north", "south"]}}, "required": ["port"]}
    tool = {"type": "function", "name": "tide", "parameters": port | {"additionalProperties": False}, "strict": True}
    forcing: Any = {"model": model, "tools": [tool], "tool_choice": {"type": "function", "name": "tide"}}
    streamed = list(client.responses.create(**forcing, input=[QUESTION], stream=True))
    call = streamed[-1].response.output[0]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It is high."}
    conversation = [QUESTION, call.model_dump(exclude_none=True, exclude={"status", "id"}), output]
    after = client.responses.create(**(asked | {"input": conversation, "instructions": "Be brief."}))
    refusals = []
    for change in ({"previous_response_id": "resp_1"}, {"store": True}, {"input": [{"type": "item_reference"}]}):
        try:
            client.responses.create(**(asked | change))
        except openai.BadRequestError as error:
            refusals.append([error.param, error.body["message"]])  # type: ignore[index]
    return {
        "text": whole.output_text,
        "status": [whole.status, whole.incomplete_details and whole.incomplete_details.reason],
        "types": [event.type for event in events],
        "numbers": [event.sequence_number for event in events],
        "deltas": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
        "streamed": events[-1].response.output_text,
        "usage": [whole.usage.model_dump(), events[-1].response.usage.model_dump()],
        "call": [call.name, call.arguments],
        "call_types": [event.type for event in streamed],
        "after": after.output_text,
        "refusals": refusals,
    }


def main() -> None:
    url, key, model, dataset, folder = sys.argv[1:]
    client = openai.OpenAI(base_url=url, api_key=key, timeout=300)
    suffix = f"quay-{openai.__version__}"
    others = {"dpo": preferring(client, model, Path(folder)), "reinforcement": reinforced(client, model, Path(folder))}
    file = client.files.create(file=Path(dataset), purpose="fine-tune")
    job = trained(client, model, file, suffix)
    told: dict[str, Any] = {"version": openai.__version__, "job": job.model_dump()}
    if job.status == "succeeded":
        checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id, limit=2))
        metrics, tar = job.result_files
        path = Path(folder) / "adapter.tar"
        client.files.content(tar).write_to_file(path)
        told |= {
            "events": events_of(client, job),
            "checkpoints": [item.model_dump() for item in checkpoints],
            "metrics": client.files.content(metrics).text,
            "tar": {"path": str(path), "bytes": client.files.retrieve(tar).bytes},
            "models": [item.id for item in client.models.list()],
            "answer": answer(client, job.fine_tuned_model),
            "streamed": streamed(client, job.fine_tuned_model),
            "formed": formed(client, job.fine_tuned_model),
            "forced": forced(client, job.fine_tuned_model),
            "by_settings": by_settings(client, job.fine_tuned_model),
            "earlier": answer(client, checkpoints[-1].fine_tuned_model_checkpoint),
            "responded": responded(client, job.fine_tuned_model),
            "base": [answer(client, BASE), client.models.retrieve(BASE).id],
            "not_here": [
                refused(lambda: client.embeddings.create(model=BASE, input="a")),
                refused(client.batches.list),
                refused(lambda: answer(client, "Qwen/Qwen3-9B")),
            ],
        }
    if openai.__version__.startswith("3."):
        continued = trained(client, job.fine_tuned_model, file, suffix, steps=1)
        told["continued"] = continued.model_dump()
        told["continued_events"] = events_of(client, continued)
    told |= {name: told_of(client, ended(client, other)) for name, other in others.items()}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
