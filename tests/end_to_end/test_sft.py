"""The spine: a dataset in, a published adapter out, through every process of the real system."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from longshore.dataset_runs import SFTRun
from longshore.training import Lora
from service.inference.retraining import choose, stretches
from service.sealing import Signer
from shared.settings import Settings
from shared.storage.artifacts import sha256_file
from shared.storage.paths import MANIFEST, published_version, version_claim
from shared.storage.store import ObjectStore, open_store
from tests import hub_server
from tests.activities.test_end_tokens import make_base
from tests.conftest import S3Server
from tests.end_to_end.runs import jsonl
from tests.end_to_end.stack import Answer, Stack, wait_until
from tests.end_to_end.victims import kill, ranks

pytestmark = pytest.mark.slow

TIDE = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {"quay": {}}}}}
TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_run_ends_with_a_published_adapter(stack: Stack, undisturbed: Answer) -> None:
    answer = undisturbed.json
    assert answer["status"] == "succeeded"
    assert answer["steps"] == 60
    assert answer["metrics"]["loss"] > 0
    published = Path(answer["adapter"].removeprefix("file://"))
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md", "manifest.json"} <= {
        path.name for path in published.iterdir()
    }


def test_an_estimate_is_what_a_run_plans_to_the_token(
    stack: Stack, undisturbed: Answer, sft_options: list[str]
) -> None:
    """60 steps of 40 examples of 256: 8 passes and a part. The run that has ended shows its own."""
    part = [*sft_options[1:], "--batch-size", "40"]
    estimated = stack.cli("estimate", *part).json
    assert estimated["is_exact"] and estimated["is_complete"] and not estimated["epochs"].is_integer()
    run_id = stack.cli("submit", *part).json["run_id"]
    planned = wait_until(lambda: stack.cli("get", run_id, "--json").json["planned_tokens"], "it is packed")
    stack.cli("cancel", run_id)
    whole = stack.cli("estimate", *sft_options[1:]).json["tokens"]
    assert (planned, undisturbed.json["planned_tokens"]) == (estimated["tokens"], whole)


def test_what_was_published_is_fetched_asked_and_trained_on_by_its_name(
    stack: Stack, undisturbed: Answer, options: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run_id = undisturbed.json["run_id"]
    for asked, folder in ((run_id, "run"), (f"{run_id}:v1", "adapter")):
        assert stack.cli("download", asked, "--into", str(tmp_path / folder)).code == 0
    assert stack.cli("export", f"{run_id}:v1", "--merged", "--into", str(tmp_path / "merged")).code == 0
    into = str(tmp_path / "gguf")
    gguf = stack.cli("export", f"{run_id}:v1", "--gguf", "--type", "f16", "--into", into, "--json").json["files"]
    assert stack.cli("download", run_id, "--checkpoint", "60", "--into", str(tmp_path / "checkpoint")).code == 0
    assert (tmp_path / "checkpoint" / "weights" / "adapter_config.json").exists()
    missing = stack.cli("download", run_id, "--checkpoint", "7", check=False)
    assert missing.code == 102 and "of step 7; it has: 50, 60" in missing.stderr, missing
    base, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny_model, tmp_path / "merged"))
    ids = torch.tensor([[5, 80, 33, 7]])
    with torch.no_grad():
        before, ours = base(ids).logits, merged(ids).logits
        theirs = [PeftModel.from_pretrained(base, tmp_path / name)(ids).logits for name in ("run", "adapter")]
    options_of_gguf = {"gguf_file": gguf[0], "config": base.config, "dtype": torch.float32}
    read_back = AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", **options_of_gguf)
    with torch.no_grad():
        assert (read_back(ids).logits - ours).abs().max() < 5e-3
    assert torch.allclose(ours, theirs[0], atol=1e-4) and torch.equal(*theirs) and not torch.allclose(ours, before)
    said = stack.cli("chat", run_id, "How many crates are on quay 3?", "--temperature", "0", "--max-tokens", "8")
    assert said.code == 0 and said.stdout.strip(), said
    place = options.index("--model") + 1
    named = [*options[:place], f"{run_id}:v1", *options[place + 1 :], "--steps", "1"]
    again = stack.cli(*named, "--wait").json
    assert stack.cli("get", again["run_id"], "--json").json["run"]["initial_adapter"] == undisturbed.json["adapter"]


def test_an_export_goes_to_a_hub_and_to_s3_by_credentials_that_stay_with_the_user(
    stack: Stack, undisturbed: Answer, s3_server: S3Server, tmp_path: Path
) -> None:
    name, token = f"{undisturbed.json['run_id']}:v1", f"hf_{secrets.token_hex(17)}"
    options = ["export", name, "--gguf", "--type", "f16"]
    [file] = stack.cli(*options, "--into", str(tmp_path / "gguf"), "--json").json["files"]
    expected = (tmp_path / "gguf" / file).read_bytes()
    for bad, rule in ((("--push", "name"), "ORG/NAME"), (("--to", "file:///x"), "no s3:// URI")):
        assert rule in stack.cli(*options, *bad, check=False).stderr
    online = {"HF_HUB_OFFLINE": "0", "HF_TOKEN": "", "HF_HOME": str(tmp_path / "hf")}
    with hub_server.serving(token) as hub, stack.with_environment(HF_ENDPOINT=hub.url, **online):
        none = stack.cli(*options, "--push", "org/name", check=False)
        assert none.code == 2 and "no token for the hub" in none.stderr and "hf auth login" in none.stderr
        with stack.with_environment(HF_TOKEN="hf_another"):
            refused = stack.cli(*options, "--push", "org/name", check=False)
        assert "the hub answers 401 to /api/repos/create" in refused.stderr, refused
        with stack.with_environment(HF_TOKEN=token):
            pushed = stack.cli(*options, "--push", "org/name")
    assert hub.files == {file: expected} and "private" in hub.made[-1].values()
    assert token not in pushed.stdout + pushed.stderr + refused.stdout + refused.stderr
    s3 = {"LONGSHORE_S3__ENDPOINT_URL": s3_server.endpoint_url, "AWS_ACCESS_KEY_ID": "test"}
    with stack.with_environment(**s3, AWS_SECRET_ACCESS_KEY="test-secret", AWS_DEFAULT_REGION="us-east-1"):
        stack.cli(*options, "--to", f"{s3_server.uri}/out")
    assert open_store(f"{s3_server.uri}/out", s3_server.settings).get_bytes(file) == expected
    left = [path for path in stack.root.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert left == [], "the store, Temporal's database and every log are below the root"


def test_a_published_adapter_is_verified_and_steps_done_again_give_its_bits(
    stack: Stack, undisturbed: Answer, tmp_path: Path
) -> None:
    name, key = f"{undisturbed.json['run_id']}:v1", tmp_path / "keys.pem"
    document = stack.cli("verify", name, "--retrain", "--seed", "1", "--json").json
    assert document["retrained"]["equal"] and "steps" in document["retrained"]["stretch"]
    inputs = document["statement"]["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert {each["name"] for each in inputs} >= {"base model", "data units", "data plan"}
    assert len(document["statement"]["predicate"]["runDetails"]["builder"]["version"]["code"]) == 64
    key.write_text(Signer(Settings(root=tmp_path)).public_key.pem)
    strange = stack.cli("verify", name, "--key", str(key), check=False)
    assert strange.code == 100 and "it is signed by" in strange.stderr
    store = open_store(f"file://{stack.root}/store", Settings(root=stack.root).s3)
    statement = f"{published_version('default', 'adapters', undisturbed.json['run_id'], 1)}/provenance.json"
    with changed(store, statement, b'"payload":"', b'"payload":"AAAA'):
        assert "it is not what key" in stack.cli("verify", name, check=False).stderr
    claim = version_claim("default", "adapters", undisturbed.json["run_id"], 1)
    put_there = [info.key for info in (*store.list(statement.removesuffix("provenance.json")), *store.list(claim))]
    second = {key: key.replace("v000001", "v000002") for key in put_there}
    for key, copy in second.items():
        store.put_bytes(copy, store.get_bytes(key))
    moved = stack.cli("verify", f"{undisturbed.json['run_id']}:v2", check=False)
    for copy in second.values():
        store.delete(copy)
    assert moved.code == 100 and "the statement was signed for another version" in moved.stderr
    [job] = [
        each.key for each in store.list(f"runs/{undisturbed.json['run_id']}/logs/") if each.key.endswith("job.json")
    ]
    retrained = ("verify", name, "--retrain", "--seed", "1")
    with changed(store, job, b'"learning_rate": 0.01', b'"learning_rate": 0.02'):
        another = stack.cli(*retrained, check=False)
    assert another.code == 100 and "is the one that the statement names" in another.stderr, another
    made = choose(stretches(store, undisturbed.json["run_id"]), undisturbed.json["run_id"], seed=1).made
    manifest = f"{made.uri.removeprefix(f'{store.uri}/')}/{MANIFEST}"
    with changed(store, manifest, b'"schema_version": 1', b'"schema_version":1'):
        other = stack.cli(*retrained, check=False)
    assert other.code == 100 and "OTHER BITS" in other.stdout, other


@contextmanager
def changed(store: ObjectStore, key: str, old: bytes, new: bytes) -> Iterator[None]:
    """Have another object in the store for the length of a `with` block."""
    before = store.get_bytes(key)
    assert before.count(old) == 1, before
    store.put_bytes(key, before.replace(old, new))
    try:
        yield
    finally:
        store.put_bytes(key, before)


def test_a_base_model_that_is_fully_trained_on_tool_rows_calls_the_tool_and_stops(
    stack: Stack, tiny_model: Path, tmp_path: Path
) -> None:
    """The rows are OpenAI's: arguments are JSON text, and beside a call stands no content."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = make_base(tiny_model, tmp_path / "base")
    (model / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    function = {"name": "tide", "arguments": '{"quay": 3}'}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    asked = {"messages": [{"role": "user", "content": "How high is the tide at quay 3?"}], "tools": [TIDE]}
    rows = jsonl(tmp_path / "rows.jsonl", [{**asked, "messages": [*asked["messages"], called]}] * 8)
    options = ["submit", "sft", "--json", "--model", str(model), "--dataset", str(rows), "--steps", "80"]
    more = ["--batch-size", "8", "--full", "--learning-rate", "0.01", "--schedule", "constant", "--name", "caller"]
    published = stack.cli(*options, *more, "--wait").json["adapter"].removeprefix("file://")
    with stack.http() as client:
        told = client.post(
            "/v1/chat/completions", json={**asked, "model": "caller", "temperature": 0, "max_tokens": 80}
        )
    [choice] = told.raise_for_status().json()["choices"]
    assert [call["function"] for call in choice["message"].get("tool_calls") or []] == [function], choice
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(published), AutoTokenizer.from_pretrained(published)
    prompt = tokenizer.apply_chat_template(
        asked["messages"], tools=asked["tools"], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        drawn = theirs.generate(**prompt, max_new_tokens=80, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(drawn).endswith("</tool_call><|im_end|>"), "transformers stops there too"


def test_the_best_weights_are_published_and_a_run_ends_when_it_gets_no_better(
    stack: Stack, tiny_model: Path, chat_dataset: Path
) -> None:
    """Sixteen rates that learn, then others that ruin what was learned; the second time with a killed worker."""
    rows = {"uri": chat_dataset.as_uri()}
    run = SFTRun.model_validate(
        {
            **{"model": str(tiny_model), "dataset": rows, "eval_dataset": rows, "eval_every": 4, "seed": 7},
            **{"steps": 60, "batch_size": 64, "max_tokens": 256, "checkpoint_every": 5, "trainable": Lora(rank=4)},
            **{"schedule": "constant", "learning_rate": 3.0, "learning_rates": [0.01] * 16 + [3.0] * 44},
            **{"keep": "best", "early_stop": {"patience": 3, "metric": "eval_perplexity"}},
            **{"num_samples": 16, "sample_tokens": 128},  # which take long enough for a kill between the steps
        }
    )
    with stack.client() as client:
        runs = [client.runs.submit(run)]
        ended = [client.runs.wait(runs[0].run_id, 300)]
        runs.append(client.runs.submit(run))
        saved = stack.root / "store" / "runs" / runs[1].run_id / "checkpoints"
        wait_until(lambda: any(saved.glob("*/*/manifest.json")), "a checkpoint")
        kill(stack, ranks)
        ended.append(client.runs.wait(runs[1].run_id, 300))
        evaluated = {row.step: row.metrics["perplexity"] for row in client.runs.metrics(runs[0].run_id).evaluations}
    assert [end.state for end in ended] == ["succeeded", "succeeded"], ended
    best = min(evaluated, key=evaluated.__getitem__)
    assert 0 < best < ended[0].step == best + 12 < 60, evaluated
    for end in ended:
        assert end.step == ended[0].step
        assert (end.metrics["best_step"], end.metrics["best_eval_perplexity"]) == (best, evaluated[best])
        assert end.notices[-2:] == (
            f"the run ended after step {best + 12} of 60: eval_perplexity got no better in 3 evaluations",
            f"the weights after step {best} are published: eval_perplexity was best there",
        )
    first, second = (Path(end.adapter.removeprefix("file://"), "adapter_model.safetensors") for end in ended)
    assert sha256_file(first) == sha256_file(second)
    assert ended[1].workers_lost == 1
    checkpoints = stack.root / "store" / "runs" / runs[0].run_id / "checkpoints"
    [trained] = checkpoints.glob(f"*/step-{best:08d}/weights/adapter_model.safetensors")
    assert sha256_file(trained) == sha256_file(first)
