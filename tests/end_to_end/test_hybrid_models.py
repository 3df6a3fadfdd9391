"""Models of each kind of family, one with a tower of vision, are trained, killed, published and asked as any other."""

import signal
from pathlib import Path

import pytest

from shared.models.config import Family
from tests.depth import drawn
from tests.end_to_end.stack import Stack, wait_until
from tests.end_to_end.victims import ranks, signal_all
from tests.megatron_worker.rows import distinct_model, model_with_tower

pytestmark = [pytest.mark.slow, pytest.mark.drawn]
FAMILIES = drawn(
    [
        *("qwen3_5", "qwen3_5_moe", "gpt_oss", "gemma3", "gemma4", "deepseek_v3", "glm4_moe_lite", "nemotron_h"),
        *("granite", "olmo3"),
    ],
    1,
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    name: Family = request.param
    return name


@pytest.fixture(scope="module")
def options_of_family(
    family: Family, sft_options: list[str], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    folder = tmp_path_factory.mktemp("family")
    is_tied = family.startswith("gemma")
    model = model_with_tower(folder, family)[1] if family == "qwen3_5" else distinct_model(folder, family, is_tied)
    return [str(model) if option == str(tiny_model) else option for option in sft_options]


def test_a_killed_run_ends_with_the_same_bits_and_answers(
    stack: Stack, options_of_family: list[str], family: Family
) -> None:
    undisturbed = stack.cli(*options_of_family, "--wait")
    assert undisturbed.json["status"] == "succeeded", undisturbed
    run_id = stack.cli(*options_of_family).json["run_id"]
    stored = stack.root / "store" / "runs" / run_id / "checkpoints"
    wait_until(lambda: any(stored.glob("*/*/manifest.json")), "a checkpoint", every_s=0.01)
    signal_all(ranks(stack), signal.SIGKILL)
    ended = stack.cli("watch", run_id, "--json")
    assert ended.json["status"] == "succeeded", ended
    assert stack.adapter_sha256(ended) == stack.adapter_sha256(undisturbed)
    assert len(list((stored.parent / "logs").glob("*/*/log.jsonl"))) == 2, "it was killed before its end"
    said = stack.cli("chat", run_id, "How many crates are on quay 3?", "--temperature", "0", "--max-tokens", "8")
    assert said.stdout.strip()
