"""A model with recurrent layers, perhaps a tower of vision, is trained, killed, published and asked as any other."""

import signal
from pathlib import Path

import pytest

from tests.depth import drawn
from tests.end_to_end.stack import Stack, wait_until
from tests.end_to_end.victims import ranks, signal_all
from tests.megatron_worker.rows import distinct_model, model_with_tower

pytestmark = [pytest.mark.slow, pytest.mark.drawn]


@pytest.fixture(scope="module", params=drawn(["qwen3_5", "nemotron_h"], 1))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def hybrid_options(
    family: str, sft_options: list[str], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    folder = tmp_path_factory.mktemp("hybrid")
    model = distinct_model(folder, "nemotron_h") if family == "nemotron_h" else model_with_tower(folder, "qwen3_5")[1]
    return [str(model) if option == str(tiny_model) else option for option in sft_options]


def test_a_killed_run_ends_with_the_same_bits_and_answers(stack: Stack, family: str, hybrid_options: list[str]) -> None:
    undisturbed = stack.cli(*hybrid_options, "--wait")
    assert undisturbed.json["status"] == "succeeded", undisturbed
    run_id = stack.cli(*hybrid_options).json["run_id"]
    stored = stack.root / "store" / "runs" / run_id / "checkpoints"
    wait_until(lambda: any(stored.glob("*/*/manifest.json")), "a checkpoint", every_s=0.01)
    signal_all(ranks(stack), signal.SIGKILL)
    ended = stack.cli("watch", run_id, "--json")
    assert ended.json["status"] == "succeeded", ended
    assert stack.adapter_sha256(ended) == stack.adapter_sha256(undisturbed)
    assert len(list((stored.parent / "logs").glob("*/*/log.jsonl"))) == 2, "it was killed before its end"
    if family != "nemotron_h":  # of which the sampler has no decoder
        said = stack.cli("chat", run_id, "How many crates are on quay 3?", "--temperature", "0", "--max-tokens", "8")
        assert said.stdout.strip()
