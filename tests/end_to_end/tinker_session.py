"""Programs of Tinker's own client, each in a process of its own. Tells JSON.

python -m tests.end_to_end.tinker_session PROGRAM URL KEY MODEL [ARGUMENT]
"""

import io
import json
import sys
import tarfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import tinker
from tinker import types

from tests.end_to_end.tinker_data import batches, weights_of

warnings.simplefilter("ignore")
Told = dict[str, Any]


def datum(ids: list[int], weights: list[float]) -> types.Datum:
    inputs = {"target_tokens": ids[1:], "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def data_of(batch: list[list[int]], scale: float = 1.0) -> list[types.Datum]:
    return [datum(ids, [weight * scale for weight in weights_of(ids)]) for ids in batch]


def refused(call: Callable[[], Any]) -> Told:
    """How the client tells of a refusal."""
    try:
        call()
    except tinker.APIStatusError as error:
        return {"class": type(error).__name__, "status": error.status_code, "body": error.body}
    except tinker.RequestFailedError as error:
        return {"class": type(error).__name__, "category": error.category.name, "text": str(error)}
    raise AssertionError("nothing was refused")


def opened(url: str, key: str) -> tinker.ServiceClient:
    return tinker.ServiceClient({"of": "a test"}, base_url=f"{url}/tinker", api_key=f"tml-{key}")


def ready(client: Any) -> Any:
    """A client that was asked for: since 0.38 it is a future's."""
    return client.result() if hasattr(client, "result") else client


def sft(service: tinker.ServiceClient, model: str, argument: str) -> Told:
    """Ten steps of an SFT job by hand: its order, its optimizer, and its mean over 32 targets as weights."""
    client = ready(service.create_lora_training_client(model, rank=4, seed=7))
    adam = types.AdamParams(learning_rate=0.01, beta2=0.999, eps=1e-8, grad_clip_norm=1.0)
    losses = []
    for batch in json.loads(argument):
        passes = client.forward_backward(data_of(batch, 1 / 32), "cross_entropy")
        step = client.optim_step(adam)
        losses.append(passes.result().metrics["loss:sum"])
        step.result()
    path = client.save_weights_external("final").result().path
    urls = client_rest(service).get_external_weights_urls(path).result().urls
    files = {
        name: httpx.get(url, trust_env=False, timeout=60).raise_for_status().content.hex() for name, url in urls.items()
    }
    forward = client.forward(data_of(batches(1)[0]), "cross_entropy").result()
    return {
        "losses": losses,
        "files": files,
        "scores": [len(each["logprobs"].data) for each in forward.loss_fn_outputs],
    }


def export(service: tinker.ServiceClient, model: str, argument: str) -> Told:
    """The cookbook's export: external weights are downloaded, and merged into a folder of the argument's."""
    import torch
    from tinker_cookbook import weights
    from transformers import AutoModelForCausalLM

    # The tiny model's embeddings are tied: an adapter of its output alone cannot be merged.
    client = ready(service.create_lora_training_client(model, rank=4, seed=7, train_unembed=False))
    for batch in batches(2):
        client.forward_backward(data_of(batch), "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.05)).result()
    path = client.save_weights_external("whole").result().path
    adapter, merged = f"{argument}/adapter", f"{argument}/merged"
    weights.download(tinker_path=path, output_dir=adapter)
    weights.build_hf_model(base_model=model, adapter_path=adapter, output_path=merged)
    ids = batches(1)[0][0]
    loaded = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    with torch.no_grad():
        logits = loaded(torch.tensor([ids[:-1]])).logits[0]
    scores = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    here = client.forward(data_of([ids]), "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    return {"merged": scores.tolist(), "here": list(here)}


def client_rest(service: tinker.ServiceClient) -> Any:
    return service.create_rest_client()


def whole(service: tinker.ServiceClient, model: str, argument: str) -> Told:
    """Everything that a client does, once."""
    import torch

    told: Told = {"version": tinker.__version__}
    client = ready(service.create_lora_training_client(model, rank=4, seed=7, user_metadata={"a": "b"}))
    told["info"] = client.get_info().model_dump()
    told["tokenizer"] = len(client.get_tokenizer())
    data = data_of(batches(1)[0])
    adam = types.AdamParams(learning_rate=0.02)
    told["passes"] = client.forward_backward(data, "cross_entropy").result().metrics
    told["step"] = client.optim_step(adam).result().metrics
    told["state"] = client.save_state("first", ttl_seconds=3600).result().path
    told["after"] = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
    client.forward_backward(data, "cross_entropy")
    client.optim_step(adam).result()

    # Sampling: ephemeral, by path, of the base; and policy losses on what was drawn.
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    params = types.SamplingParams(max_tokens=6, seed=11, temperature=1.0)
    own = ready(client.save_weights_and_get_sampling_client())
    drawn = own.sample(prompt, 3, params, include_prompt_logprobs=True).result()
    told["drawn"] = [list(each.tokens) for each in drawn.sequences]
    told["prompt_logprobs"] = drawn.prompt_logprobs
    told["computed"] = own.compute_logprobs(prompt).result()
    path = client.save_weights_for_sampler("policy").result().path
    told["by_path"] = list(
        ready(service.create_sampling_client(model_path=path)).sample(prompt, 1, params).result().sequences[0].tokens
    )
    base = ready(service.create_sampling_client(base_model=model))
    told["by_base"] = list(base.sample(prompt, 1, params).result().sequences[0].tokens)
    scored = base.sample(prompt, 1, types.SamplingParams(max_tokens=1), topk_prompt_logprobs=3).result()
    told["top"] = [list(prompt.to_ints()), scored.topk_prompt_logprobs]
    [likely] = base.sample(prompt, 1, params, topk_sample_logprobs=3).result().sequences
    told["drawn_top"] = [list(prompt.to_ints()), list(likely.tokens), list(likely.logprobs), likely.topk_logprobs]
    told["stopped"] = (
        base.sample(prompt, 1, types.SamplingParams(max_tokens=6, seed=11, stop=[told["by_base"][2]]))
        .result()
        .sequences[0]
    )
    told["stopped"] = [list(told["stopped"].tokens), told["stopped"].stop_reason]
    told["policies"] = policies(client, drawn)

    def squares(_: Any, logprobs: list[Any]) -> Any:
        return sum((each.exp() ** 2).sum() for each in logprobs), {"own:sum": 1.0}

    told["custom"] = client.forward_backward_custom(data, squares).result().metrics
    logprobs = [
        torch.tensor(each["logprobs"].data) for each in client.forward(data, "cross_entropy").result().loss_fn_outputs
    ]
    told["squares"] = float(sum((each.exp() ** 2).sum() for each in logprobs))
    told["custom_step"] = client.optim_step(adam).result().metrics

    # States: another client goes on from one; refusals cost no request that follows.
    again = ready(service.create_training_client_from_state_with_optimizer(told["state"]))
    told["again"] = again.forward(data, "cross_entropy").result().metrics["loss:sum"]
    told["refused"] = refusals(service, again, data)
    told["still"] = again.forward(data, "cross_entropy").result().metrics["loss:sum"]
    told["loaded"] = loaded(service, client, again, told["state"], data, adam)
    told["trained"] = target_modules(service, model)
    told["rest"] = rest(service, client, told["state"])
    service.close("success").result() if hasattr(service, "close") else None
    return told


def loaded(service: Any, client: Any, warm: Any, state: str, data: Any, adam: Any) -> Told:
    """Losses of a state in a new model without its optimizer, before a step and after it, and after the same step with
    the optimizer; and of the model's own state, loaded into it again.
    """
    cold = ready(service.create_training_client_from_state(state))
    told: Told = {"cold": [cold.forward(data, "cross_entropy").result().metrics["loss:sum"]]}
    for each in (cold, warm):
        each.forward_backward(data, "cross_entropy")
        each.optim_step(adam).result()
    told["cold"].append(cold.forward(data, "cross_entropy").result().metrics["loss:sum"])
    told["warm"] = warm.forward(data, "cross_entropy").result().metrics["loss:sum"]
    before = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
    client.load_state_with_optimizer(state).result()
    told["own"] = [before, client.forward(data, "cross_entropy").result().metrics["loss:sum"]]
    return told


def target_modules(service: Any, model: str) -> list[str]:
    """What a model trains whose client asked for attention alone."""
    client = ready(service.create_lora_training_client(model, rank=2, train_mlp=False, train_unembed=False))
    path = client.save_weights_external("attention").result().path
    urls = client_rest(service).get_external_weights_urls(path).result().urls
    config = httpx.get(urls["adapter_config.json"], trust_env=False, timeout=60).raise_for_status().json()
    return sorted(config["target_modules"])


def policies(client: tinker.TrainingClient, drawn: Any) -> Told:
    """Losses of each policy loss on sampled sequences, as its client would compute them beside what was told."""
    told = {}
    sequences = [([5, 6, 7, 8, *each.tokens], list(each.logprobs)) for each in drawn.sequences]
    advantages = [1.0, -0.5, 0.25]
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={
                "target_tokens": [0, 0, 0, *ids[4:]],
                "logprobs": [0.0, 0.0, 0.0, *(each - 0.1 for each in logprobs)],
                "advantages": [0.0, 0.0, 0.0, *[advantage] * len(logprobs)],
            },
        )
        for (ids, logprobs), advantage in zip(sequences, advantages, strict=True)
    ]
    masked = [
        types.Datum(
            model_input=each.model_input,
            loss_fn_inputs={**each.loss_fn_inputs, "sequence_ratio_mask": [0.0] * 3 + [1.0] * len(logprobs)},
        )
        for each, (_, logprobs) in zip(data, sequences, strict=True)
    ]
    name, length = "drawn", len(sequences[0][1])
    read = [types.PromptProvenanceSpan(sequence_id=name, length=4)]
    read.append(types.SampledProvenanceSpan(sequence_id=name, length=length - 1))
    scored = [types.PromptProvenanceSpan(sequence_id=name, offset=1, length=3)]
    scored.append(types.SampledProvenanceSpan(sequence_id=name, length=length))
    spanned = [each.with_provenance(model_input=read, loss_fn_inputs=scored) for each in data]
    for name, config in (
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
        ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
        ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
        ("dro", {"beta": 0.5}),
        ("stable_reinforce", {"kl_coeff": 0.5}),
    ):
        inputs = {"gspo": masked, "stable_reinforce": spanned}.get(name, data)
        passes = client.forward_backward(inputs, name, config).result()
        scores = client.forward(inputs, name, config).result()
        told[name] = {
            "loss": passes.metrics["loss:sum"],
            "forward": scores.metrics["loss:sum"],
            "new": [list(each["logprobs"].data)[3:] for each in passes.loss_fn_outputs],
            "old": [[each - 0.1 for each in logprobs] for _, logprobs in sequences],
            "advantages": advantages,
        }
    return told


def refusals(service: Any, client: Any, data: Any) -> Told:
    out_of_it = [datum([5, 99_999, 6], [1.0, 1.0])]
    return {
        "loss": refused(lambda: client.forward_backward(data, "stable_reinforce").result()),
        "token": refused(lambda: client.forward_backward(out_of_it, "cross_entropy").result()),
        "base": refused(lambda: ready(service.create_lora_training_client("/no/such/model"))),
    }


def rest(service: Any, client: Any, state: str) -> Told:
    asked = client_rest(service)
    asked.publish_checkpoint_from_tinker_path(state).result()
    asked.set_checkpoint_ttl_from_tinker_path(state, None).result()
    run = asked.get_training_run(client.model_id).result()
    listed = asked.list_checkpoints(client.model_id).result().checkpoints
    told = {
        "run": run.model_dump(mode="json"),
        "runs": len(asked.list_training_runs().result().training_runs),
        "checkpoints": [[each.checkpoint_id, each.public, each.expires_at is None] for each in listed],
        "all": len(asked.list_user_checkpoints().result().checkpoints),
        "session": asked.get_session(client.model_id.split(":")[0]).result().model_dump(),
        "weights": asked.get_weights_info_by_tinker_path(state).result().model_dump(),
    }
    if hasattr(asked, "get_checkpoint_archive_url"):
        url = asked.get_checkpoint_archive_url(client.model_id, listed[0].checkpoint_id).result().url
        content = httpx.get(url, trust_env=False, timeout=60).raise_for_status().content
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            told["archive"] = sorted(archive.getnames())
    asked.delete_checkpoint_from_tinker_path(state).result()
    told["left"] = len(asked.list_checkpoints(client.model_id).result().checkpoints)
    return told


def large(service: tinker.ServiceClient, model: str, argument: str) -> Told:
    """A forward_backward of 3,000 data, which the client cuts into chunks and sends out of order."""
    client = ready(service.create_lora_training_client(model, rank=4, seed=7))
    data = [datum([5 + n % 400, 6, 7, 8], [1.0, 1.0, 1.0]) for n in range(3000)]
    begin = time.monotonic()
    output = client.forward_backward(data, "cross_entropy").result()
    took_s = time.monotonic() - begin
    first = client.forward(data[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    norm = client.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm:mean"]
    half = [client.forward_backward(part, "cross_entropy") for part in (data[:1500], data[1500:])]
    sums = [each.result().metrics["loss:sum"] for each in half]
    again = client.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm:mean"]
    return {
        "num": len(output.loss_fn_outputs),
        "loss": output.metrics["loss:sum"],
        "halves": sums,
        "first": [list(output.loss_fn_outputs[0]["logprobs"].data), list(first)],
        "norms": [norm, again],
        "seconds": took_s,
    }


def loop(service: tinker.ServiceClient, model: str, argument: str) -> Told:
    """Steps on the same data each time, told line by line. States are saved, and sampled from."""
    client = ready(service.create_lora_training_client(model, rank=4, seed=7))
    adam = types.AdamParams(learning_rate=0.01)
    prompt, params = types.ModelInput.from_ints([5, 6, 7, 8]), types.SamplingParams(max_tokens=6, seed=11)
    told, drawn = [], []
    for number, batch in enumerate(batches(int(argument))):
        passes = client.forward_backward(data_of(batch), "cross_entropy")
        step = client.optim_step(adam)
        if number % 4 == 3:
            client.save_state(f"step-{number}")
            drawn.append(ready(client.save_weights_and_get_sampling_client()).sample(prompt, 2, params))
        told.append([passes.result().metrics["loss:sum"], step.result().metrics["grad_norm:mean"]])
        print(json.dumps({"step": number}), flush=True)
    path = client.save_weights_external("final").result().path
    urls = client_rest(service).get_external_weights_urls(path).result().urls
    samples = [[list(each.tokens) for each in future.result().sequences] for future in drawn]
    return {
        "steps": told,
        "samples": samples,
        "adapter": httpx.get(urls["adapter_model.safetensors"], trust_env=False, timeout=60).content.hex(),
    }


def waits(service: tinker.ServiceClient, model: str, argument: str) -> Told:
    """A step, then nothing until there is a file; then the scores before and after that wait, and another step."""
    client = ready(service.create_lora_training_client(model, rank=4, seed=7))
    data, adam = data_of(batches(1)[0]), types.AdamParams(learning_rate=0.01)

    def loss() -> float:
        return client.forward(data, "cross_entropy").result().metrics["loss:sum"]

    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(adam).result()
    before = loss()
    print("waits", flush=True)
    while not Path(argument).exists():
        time.sleep(0.1)
    after = loss()
    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(adam).result()
    return {"before": before, "after": after, "trained": loss()}


def main() -> None:
    program, url, key, model, argument = sys.argv[1:6]
    programs = {"sft": sft, "whole": whole, "large": large, "loop": loop, "export": export, "waits": waits}
    print(json.dumps(programs[program](opened(url, key), model, argument), default=str))


if __name__ == "__main__":
    main()
