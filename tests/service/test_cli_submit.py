"""What the options of `longshore submit` make of a run, and how those that cannot be are refused."""

import json
from pathlib import Path

import pytest

from tests.service.conftest import Service


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--learning-rate", "-1"], "--learning-rate: "),
        (["--lora-rank", "0"], "--lora-rank: "),
        (["--samples", "20"], "--samples: "),
        (["--lora-targets", "q_proj,x_proj"], "--lora-targets: "),
        (["--epochs", "1"], "exactly one of epochs and steps"),
        (["--lora-target-pattern", "(q_proj"], "--lora-target-pattern: no regular expression"),
        (["--lora-rank-pattern", '{"q_proj": 0}'], "--lora-rank-pattern: "),
        (["--full", "--lora-rank", "4"], "--full excludes --lora-rank"),
        (["--prompt-field", "q"], "go together"),
        (["--model", "./nowhere"], "--model: there is no folder ./nowhere"),
        (["--dataset", "nowhere.jsonl"], "--dataset: there is no file nowhere.jsonl"),
        (["--eval-dataset", "."], "--eval-dataset: . is a folder"),
        (["--schedule", "sometimes"], "--schedule"),
        (["--timeout", "3"], "--timeout goes with --wait"),
        (["--colour", "red"], "--colour"),
        (["--format", "preference"], "--dataset: rows of the format preference are preference pairs"),
    ],
)
def test_wrong_options_end_with_2_and_name_the_option(service: Service, options, extra, said) -> None:
    answer = service.cli(*options, *extra)
    assert answer.code == 2, answer
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""


def test_options_of_preference_runs(service: Service, options) -> None:
    options = ["submit", "dpo", *options[2:]]
    given = [
        "--beta",
        "0.3",
        "--label-smoothing",
        "0.1",
        "--reference",
        "s3://bucket/adapter",
        "--format",
        "preference",
    ]
    shared = [
        "--lora-rank",
        "4",
        "--warmup",
        "2",
        "--tp",
        "2",
        "--eval-dataset",
        "s3://bucket/eval.jsonl",
        "--samples",
        "3",
    ]
    answer = service.cli(*options, *given, *shared, "--wait", "--json")
    assert answer.code == 0 and answer.json["run_id"].startswith("dpo-"), answer
    run = service.cli("get", answer.json["run_id"], "--json").json["run"]
    assert (run["kind"], run["beta"], run["label_smoothing"], run["reference"]) == (
        "dpo",
        0.3,
        0.1,
        "s3://bucket/adapter",
    )
    assert (run["learning_rate"], run["epochs"], run["steps"], run["batch_size"]) == (1e-5, None, 4, 2)
    assert (run["trainable"]["rank"], run["warmup_steps"], run["layout"]["tp"], run["num_samples"]) == (4, 2, 2, 3)
    assert run["dataset"]["format"] == run["eval_dataset"]["format"] == "preference"
    for extra, said in (
        (["--beta", "0"], "--beta: "),
        (["--label-smoothing", "0.5"], "--label-smoothing: "),
        (["--format", "chat"], "--dataset: dpo learns from preference pairs"),
        (["--too-long", "truncate"], "--too-long"),
    ):
        refused = service.cli(*options, *extra)
        assert refused.code == 2 and said in refused.stderr, refused


def test_an_objective_of_preferences_is_chosen_and_reads_its_own_options_alone(service: Service) -> None:
    options = ["submit", "dpo", "--model", "org/tiny", "--dataset", "s3://bucket/rows.jsonl", "--objective"]
    given = ["kto", "--desirable-weight", "1.5", "--format", "chat"]
    run = service.cli("get", service.cli(*options, *given).stdout.strip(), "--json").json["run"]
    assert (run["objective"], run["desirable_weight"], run["dataset"]["format"]) == ("kto", 1.5, "chat")
    run = service.cli("get", service.cli(*options, "simpo", "--gamma", "1").stdout.strip(), "--json").json["run"]
    assert (run["objective"], run["gamma"], run["reference"]) == ("simpo", 1.0, None)
    for extra, said in (
        (["ppo"], "--objective"),
        (["orpo", "--reference", "base"], "reference would be ignored by orpo"),
        (["ipo", "--desirable-weight", "2"], "desirable_weight would be ignored by ipo"),
        (["ipo", "--prompt-field", "p", "--completion-field", "c"], "--dataset: prompt_field and completion_field"),
        (["kto", "--format", "text"], "--dataset: rows of the format text have no answers"),
    ):
        refused = service.cli(*options, *extra)
        assert refused.code == 2 and said in refused.stderr, refused


def test_every_option_reaches_the_run(service: Service, options) -> None:
    given = [
        *("--name", "harbour", "--lora-rank", "4", "--lora-alpha", "8", "--lora-targets", "q_proj,v_proj"),
        *("--lora-layers", "0", "--lora-layers", "1", "--lora-rank-pattern", '{"q_proj": 2}', "--lora-rank-stabilized"),
        *("--lora-dropout", "0.25", "--lora-dora"),
        *("--lora-alpha-pattern", '{"layers.1.*": 3}'),
        *("--learning-rate", "0.5", "--schedule", "cosine", "--warmup", "2", "--max-tokens", "64", "--seed", "5"),
        *("--tp", "2", "--dp", "2", "--dtype", "bfloat16", "--prompt-field", "q", "--completion-field", "a"),
        *("--eval-dataset", "s3://bucket/eval.jsonl", "--eval-every", "2", "--samples", "3"),
    ]
    run = service.cli("get", service.cli(*options, *given).stdout.strip(), "--json").json["run"]
    assert run["name"] == "harbour"
    assert run["trainable"] == {
        **{"kind": "lora", "rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"], "target_pattern": None},
        **{"layers": [0, 1], "rank_pattern": [["q_proj", 2]], "alpha_pattern": [["layers.1.*", 3]]},
        **{"rank_stabilized": True, "dropout": 0.25, "dora": True, "head": None},
    }
    assert (run["learning_rate"], run["schedule"], run["warmup_steps"]) == (0.5, "cosine", 2)
    assert (run["steps"], run["epochs"], run["batch_size"], run["max_tokens"], run["seed"]) == (4, None, 2, 64, 5)
    assert (run["engine"], run["layout"]["tp"], run["layout"]["dp"], run["dtype"]) == ("megatron", 2, 2, "bfloat16")
    assert (run["dataset"]["prompt_field"], run["dataset"]["completion_field"]) == ("q", "a")
    assert (run["eval_dataset"]["uri"], run["eval_every"], run["num_samples"]) == ("s3://bucket/eval.jsonl", 2, 3)


def test_an_engine_is_chosen(service: Service, options) -> None:
    for command in (options, ["submit", "rl", "--model", "org/tiny"]):
        run = service.cli("get", service.cli(*command, "--engine", "fsdp", "--dp", "2").stdout.strip(), "--json").json
        assert (run["run"]["engine"], run["run"]["layout"]["dp"]) == ("fsdp", 2)
        refused = service.cli(*command, "--engine", "fsdp", "--pp", "2")
        assert refused.code == 2 and "linears by tp alone" in refused.stderr, refused


def test_an_algorithm_has_its_papers_loss_and_advantages_but_for_what_is_given(service: Service) -> None:
    rl = ["submit", "rl", "--model", "org/tiny"]

    def run_of(*options: str) -> dict:
        return service.cli("get", service.cli(*rl, *options).stdout.strip(), "--json").json["run"]

    assert run_of()["loss"]["kind"] == "ppo" and run_of()["advantages"] == "group_mean"
    grpo = run_of("--algorithm", "grpo")
    assert (grpo["advantages"], grpo["loss"]["aggregation"]) == ("group_normalized", "sequence_mean")
    assert grpo["loss"]["kl"]["coefficient"] == 0.04
    given = run_of("--algorithm", "grpo", "--loss", '{"kl": null}', "--advantages", "leave_one_out")
    assert (given["advantages"], given["loss"]["kl"]) == ("leave_one_out", None)
    assert given["loss"]["aggregation"] == "sequence_mean"
    refused = service.cli(*rl, "--algorithm", "cispo", "--loss", "gspo")
    assert refused.code == 2 and "algorithm cispo has the loss cispo" in refused.stderr


def test_a_run_of_its_own_rollouts_has_what_its_options_say(service: Service, tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "hm?"}]}\n')
    grader = {"type": "string_check", "name": "exact", "operation": "eq", "input": "a", "reference": "b"}
    file = tmp_path / "grader.json"
    file.write_text(json.dumps(grader))
    rl = [
        *("submit", "rl", "--model", "org/tiny", "--prompts", str(rows), "--grader", str(file), "--steps", "3"),
        *("--group-size", "4", "--stop", "END", "--stop", "STOP", "--temperature", "0.7", "--off-policy-steps", "2"),
        *("--eval-prompts", "s3://bucket/held-out.jsonl", "--eval-every", "2", "--target", "0.9"),
        *("--layout", "tp2-sp-pp2-dp2"),
    ]
    run = service.cli("get", service.cli(*rl).stdout.strip(), "--json").json["run"]
    rollouts = run["rollouts"]
    assert rollouts["prompts"]["uri"].endswith("prompts.jsonl") and rollouts["grader"]["operation"] == "eq"
    assert (rollouts["steps"], rollouts["group_size"], rollouts["stop"]) == (3, 4, ["END", "STOP"])
    assert (run["temperature"], rollouts["off_policy_steps"]) == (0.7, 2)
    held_out = rollouts["held_out"]
    assert (held_out["prompts"]["uri"], held_out["every_steps"], held_out["target"]) == (
        *("s3://bucket/held-out.jsonl", 2),
        0.9,
    )
    assert (run["layout"]["tp"], run["layout"]["sp"], run["layout"]["pp"], run["layout"]["dp"]) == (2, True, 2, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--prompts", "p.jsonl", "--steps", "1"), "grader is missing"),
        (("--group-size", "4"), "--prompts is missing"),
        (("--prompts", "p.jsonl", "--grader", "{}", "--target", "1"), "--eval-prompts is missing"),
        (("--prompts", "p.jsonl", "--grader", "no.json"), "--grader: no.json: "),
        (("--prompts", "p.jsonl", "--grader", '{"type": "x"}', "--steps", "1"), "--grader: "),
        (("--wait",), "--wait goes with --prompts"),
        (("--layout", "tp2-zz2"), "'zz2' is no degree"),
        (("--layout", "tp2", "--tp", "2"), "--layout excludes --tp"),
    ],
)
def test_rollouts_that_cannot_be_are_refused_before_anything_is_sent(
    service: Service, given: tuple[str, ...], said: str
) -> None:
    refused = service.cli("submit", "rl", "--model", "org/tiny", *given)
    assert refused.code == 2 and said in refused.stderr, refused
