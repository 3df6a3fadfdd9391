"""What is drawn follows the distribution that was asked for, in any slot; what reward models score in the sampler."""

import concurrent.futures
import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from activities.sampling.client import Sampler
from longshore.training import LINEARS
from megatron_worker.sampler.adapters import LoadedAdapter, load_adapter
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.drawing import Cuts, Penalties, draw, uniform
from megatron_worker.sampler.generation import Ending, Generator, RequestGroup, Sequence, reliable_width, shapes_of
from shared.chat.completions import SamplerReady, Sampling
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import distinct_model
from tests.megatron_worker.sampler_process import NAME, http, post, running, write_adapter
from tests.megatron_worker.scored_rows import HEADS, lora, scored_rows, step, transformers_head


def reference(logits, temperature, top_p, top_k=None, min_p=0.0):
    """The distribution as vLLM defines it, [V] float64: tempered, then cut to ever fewer of the likeliest."""
    scaled = logits.astype(np.float64) / temperature
    probability = np.exp(scaled - scaled.max())
    probability[probability < min_p * probability.max()] = 0
    if top_k is not None:
        probability[probability < np.sort(probability)[-top_k]] = 0
    probability /= probability.sum()
    order = np.argsort(-probability, kind="stable")
    reached = np.cumsum(probability[order])
    kept = order[: int(np.searchsorted(reached, top_p) + 1)]
    cut = np.zeros_like(probability)
    cut[kept] = probability[kept]
    return cut / cut.sum()


def cuts_of(num, top_p=1.0, top_k=None, min_p=0.0):
    return Cuts(
        min_p_B=torch.full((num,), float(min_p)),
        top_k_B=torch.full((num,), top_k or 2**31),
        top_p_B=torch.full((num,), float(top_p)),
    )


def draw_many(logits, temperature, numbers, **cuts):
    num = len(numbers)
    return draw(
        torch.tensor(logits).expand(num, -1).contiguous(),
        torch.full((num,), float(temperature)),
        cuts_of(num, **cuts),
        torch.tensor(numbers, dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("temperature", "cuts"),
    [
        (1.0, {}),
        (0.5, {}),
        (1.7, {"top_p": 0.8}),
        (1.0, {"top_p": 0.35}),
        (1.0, {"top_k": 7}),
        (1.3, {"min_p": 0.1}),
        (2.0, {"top_k": 12, "top_p": 0.7}),
        (2.0, {"top_k": 12, "top_p": 0.9, "min_p": 0.3}),
    ],
)
def test_frequencies_are_the_distributions(temperature, cuts):
    logits = np.random.default_rng(0).normal(0, 2, 40).astype(np.float32)
    expected = reference(logits, temperature, **({"top_p": 1.0} | cuts))
    numbers = [uniform(seed, 3) for seed in range(20_000)]
    drawn = draw_many(logits, temperature, numbers, **cuts)
    counts = np.bincount(drawn.token_B.numpy(), minlength=40)
    assert not counts[expected == 0].any()
    likely = expected * len(numbers) >= 5
    chi2 = ((counts - expected * len(numbers)) ** 2 / np.where(likely, expected * len(numbers), 1))[likely].sum()
    assert chi2 < 2 * likely.sum() + 20
    told = drawn.processed_B.numpy()
    assert np.abs(told - np.log(expected[drawn.token_B.numpy()])).max() < 1e-5
    raw = reference(logits, 1.0, 1.0)
    assert np.abs(drawn.raw_B.numpy() - np.log(raw[drawn.token_B.numpy()])).max() < 1e-5


@settings(deadline=None, max_examples=60)
@given(
    # On a grid: of tokens that differ by less than float32 has digits, rounding decides which the nucleus takes.
    st.lists(st.integers(-240, 240).map(lambda eighths: eighths / 8), min_size=2, max_size=30),
    st.floats(0.25, 4, width=32),
    st.floats(0.0625, 1, width=32),
    st.floats(0, 1, exclude_max=True),
)
def test_a_number_picks_the_token_under_it(logits, temperature, top_p, number):
    """Inversion: the token whose stretch of the cumulative distribution holds the number, within rounding."""
    expected = reference(np.array(logits, np.float32), temperature, top_p)
    token = int(draw_many(logits, temperature, [number], top_p=top_p).token_B[0])
    below, above = expected[:token].sum(), expected[: token + 1].sum()
    exact = np.sort(np.cumsum(np.sort(reference(np.array(logits, np.float32), temperature, 1.0))[::-1]))
    if np.abs(exact - top_p).min() > 1e-5:  # on the edge of the nucleus rounding decides
        assert below - 1e-5 <= number <= above + 1e-5


def test_a_row_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(0)
    logit_BV = torch.randn(8, 50, generator=generator) * 3
    temperature_B = torch.tensor([1.0, 0.0, 0.7, 1.0, 2.0, 0.0, 1.0, 0.3])
    top_p_B = torch.tensor([1.0, 0.5, 1.0, 0.6, 0.9, 1.0, 0.2, 1.0])
    top_k_B = torch.tensor([9, 3, 50, 7, 50, 50, 1, 50])
    min_p_B = torch.tensor([0.0, 0.5, 0.2, 0.0, 0.0, 0.0, 0.1, 1.0])
    uniform_B = torch.rand(8, dtype=torch.float64, generator=generator)
    penalised_BV = logit_BV.clone()
    Penalties({4: 9.0}, 0.5, 0.25).add_to(penalised_BV[2], [7, 7, 4])
    together = draw(logit_BV, temperature_B, Cuts(min_p_B, top_k_B, top_p_B), uniform_B, penalised_BV)
    for row in range(8):
        one = slice(row, row + 1)
        cuts = Cuts(min_p_B[one], top_k_B[one], top_p_B[one])
        alone = draw(logit_BV[one], temperature_B[one], cuts, uniform_B[one], penalised_BV[one] if row == 2 else None)
        assert alone.token_B[0] == together.token_B[row]
        assert torch.equal(alone.raw_B[0], together.raw_B[row])
        assert torch.equal(alone.processed_B[0], together.processed_B[row])


def test_penalties_are_vllms():
    """logits - frequency * count - presence * (count > 0), of the sequence's own tokens, and bias before."""
    logits, drawn = np.random.default_rng(1).normal(0, 2, 30), [3, 3, 3, 8, 29]
    logit_V = torch.tensor(logits, dtype=torch.float32)
    Penalties({0: 5.0, 3: -100.0}, presence=-0.5, frequency=1.5).add_to(logit_V, drawn)
    count = np.bincount(drawn, minlength=30)
    expected = logits - 1.5 * count + 0.5 * (count > 0)
    expected[[0, 3]] += [5, -100]
    assert np.abs(logit_V.numpy() - expected).max() < 1e-5


def test_ties_with_the_last_of_the_top_k_stay():
    logits = [0.0, 1.0, 1.0, -1.0, 2.0]
    drawn = draw_many(logits, 1.0, [n / 200 for n in range(200)], top_k=2)
    assert set(drawn.token_B.tolist()) == {1, 2, 4}


def test_what_is_not_allowed_is_never_drawn_and_counts_for_nothing():
    logits = np.random.default_rng(2).normal(0, 2, 40).astype(np.float32)
    allowed = np.array([1, 5, 6, 39])
    masked = np.full(40, -np.inf, np.float32)
    masked[allowed] = logits[allowed]
    among = reference(logits[allowed], 1.0, 1.0)
    for temperature, cuts in [(1.0, {}), (0.0, {}), (0.7, {"top_k": 2, "top_p": 0.9, "min_p": 0.01})]:
        drawn = draw_many(masked, temperature, [n / 500 for n in range(500)], **cuts)
        assert set(drawn.token_B.tolist()) <= set(allowed.tolist())
        places = np.searchsorted(allowed, drawn.token_B.numpy())
        assert np.abs(drawn.raw_B.numpy() - np.log(among[places])).max() < 1e-5


def test_greedy_takes_the_lowest_of_equals():
    logit_BV = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    drawn = draw(logit_BV, torch.zeros(1), cuts_of(1), torch.tensor([0.99], dtype=torch.float64))
    assert drawn.token_B.tolist() == [1]


def test_the_last_number_below_1_draws_a_possible_token():
    logits = [0.0, 0.0, -200.0]  # the last has probability 0 in float32
    assert int(draw_many(logits, 1.0, [1 - 2.0**-52]).token_B[0]) == 1


def test_numbers_are_uniform_and_do_not_repeat():
    numbers = np.array([uniform(seed, position) for seed in range(100) for position in range(100)])
    assert len(set(numbers)) == 10_000
    assert numbers.min() >= 0 and numbers.max() < 1
    assert np.abs(np.bincount((numbers * 20).astype(int)) - 500).max() < 100
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.04
    assert uniform(3, 4) == uniform(3, 4) != uniform(4, 3)


def test_all_slots_are_equal_on_this_machine(model, tmp_path):
    decoder = Decoder(model, torch.float32, torch.device("cpu"))
    adapter = load_adapter("all", write_adapter(tmp_path / "all", model, 1, LINEARS), decoder)
    assert reliable_width(decoder, (), 32) == 32
    assert reliable_width(decoder, shapes_of(adapter.lora_weights), 32) == 32


def test_unequal_slots_make_the_lane_narrower(model):
    class Uneven(Decoder):
        """Rounds the last of eight or more rows otherwise, as a kernel with a tail might."""

        def logits(self, hidden_BH, lora_weights):
            logit_BV = super().logits(hidden_BH, lora_weights).clone()
            if len(logit_BV) >= 8:
                logit_BV[-1] *= 1 + 2**-20
            return logit_BV

    assert reliable_width(Uneven(model, torch.float32, torch.device("cpu")), (), 32) == 4


def test_an_adapter_that_begins_hides_no_unequal_slots(model, tmp_path):
    """Its second matrices are zeros; those of its later versions are not."""

    class Uneven(Decoder):
        def step(self, token_B, position_B, cache, lora_weights, chosen=None):
            hidden_BH = super().step(token_B, position_B, cache, lora_weights, chosen).clone()
            if len(token_B) >= 8 and any(each.b_OR.any() for each in lora_weights.values()):
                hidden_BH[-1] *= 1 + 2**-20
            return hidden_BH

    decoder = Uneven(model, torch.float32, torch.device("cpu"))
    trained = load_adapter("all", write_adapter(tmp_path / "all", model, 1, LINEARS), decoder).lora_weights
    begun = {name: replace(each, b_OR=torch.zeros_like(each.b_OR)) for name, each in trained.items()}
    assert reliable_width(decoder, shapes_of(begun), 32) == reliable_width(decoder, shapes_of(trained), 32) == 4


def test_a_cancelled_ticket_leaves_its_slots(model):
    """It would never end by itself; what comes after it finds its slots free, and it does not grow any more."""
    decoder = Decoder(model, torch.float32, torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    generator, base = Generator(decoder, 2), LoadedAdapter(NAME, "", {})

    def ticket(max_tokens):
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        sequences = [Sequence((5, 6), sampling, seed, Ending(sampling, frozenset(), tokenizer)) for seed in range(3)]
        submitted = RequestGroup(base, sequences)
        generator.submit(submitted)
        return submitted

    loop = threading.Thread(target=generator.run, daemon=True)
    loop.start()
    endless = ticket(10**6)
    while not endless.sequences[0].token_ids:
        time.sleep(0.01)
    endless.cancelled = True
    assert ticket(2).done.wait(300)
    num_drawn = [len(sequence.token_ids) for sequence in endless.sequences]
    assert ticket(30).done.wait(300)
    assert [len(sequence.token_ids) for sequence in endless.sequences] == num_drawn
    generator.stop()
    loop.join(300)
    assert not loop.is_alive()


pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[5, 9, 12, 3, 44, 8], [7], list(range(3, 60)), [5, 9, 12, 3, 44, 9]]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = distinct_model(tmp_path_factory.mktemp("scoring"), "qwen3", tied=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    return folder


def trained(base: Path, folder: Path, per: str) -> Path:
    """A reward model of either kind, as training leaves it."""
    driven = start("fsdp", base)
    driven.add_adapter("run", lora(per), seed=3)
    for number in range(3):
        step(driven, per, [scored_rows(per, [20, 31, 12], seed=number)], 0.01)
    driven.save(folder)
    return folder / "weights"


@pytest.fixture(scope="module")
def rewards(base: Path, tmp_path_factory) -> dict[str, Path]:
    return {per: trained(base, tmp_path_factory.mktemp(per), per) for per in HEADS}


@pytest.fixture(scope="module")
def sampler(base: Path, rewards, tmp_path_factory) -> Iterator[SamplerReady]:
    with running(base, tmp_path_factory.mktemp("sampler"), "--max-model-len", "16") as found:
        for per, folder in rewards.items():
            assert post(found, "/v1/load_lora_adapter", {"lora_name": per, "lora_path": str(folder)}).is_success
        yield found


def scored(sampler: SamplerReady, model: str, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    with Sampler(sampler.url, sampler.api_key, socket_path=sampler.socket) as client:
        return client.rewards(model, [tuple(ids) for ids in prompts])


def theirs(base: Path, per: str, adapter: Path) -> torch.Tensor:
    model = transformers_head(base, per, adapter)
    with torch.no_grad():
        found = [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]
    return torch.stack([value if per == "sequence" else value[-1] for value in found])


@pytest.mark.parametrize("per", HEADS)
def test_scores_are_those_of_transformers_and_peft(base, rewards, sampler, per) -> None:
    expected = theirs(base, per, rewards[per])
    assert expected.std(dim=0).min() > 1e-3
    torch.testing.assert_close(torch.tensor(scored(sampler, per)), expected, atol=1e-5, rtol=1e-5)


def test_scores_are_the_same_bits_whatever_else_is_asked(base, rewards, sampler, tmp_path) -> None:
    before = scored(sampler, "sequence")
    policy = write_adapter(tmp_path / "policy", base, 1, ("q_proj", "v_proj"))
    assert post(sampler, "/v1/load_lora_adapter", {"lora_name": "policy", "lora_path": str(policy)}).is_success
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        body = {"model": "policy", "prompt": [5, 9, 12], "n": 20, "max_tokens": 12, "ignore_eos": True, "seed": 1}
        drawn = threads.submit(post, sampler, "/v1/completions", body)
        told = [*threads.map(lambda per: scored(sampler, per), ["sequence", "token", "sequence"])]
    assert drawn.result().is_success and told[0] == told[2] == before
    for path, ask in (("/v1/sleep", {"level": 2}), ("/v1/wake", {})):
        assert post(sampler, path, ask).is_success
    assert scored(sampler, "sequence") == before


def test_what_is_too_long_or_no_finite_number_has_no_score(base, rewards, sampler, tmp_path) -> None:
    assert scored(sampler, "sequence", [[3] * 64, [3] * 65, [4, 3]])[1] is None
    assert scored(sampler, "sequence", [[3] * 65]) == [None]
    broken = Path(shutil.copytree(rewards["sequence"], tmp_path / "broken"))
    tensors = load_file(broken / "adapter_model.safetensors")
    tensors["base_model.model.score.weight"][1] = 3e38  # the sum overflows
    save_file(tensors, broken / "adapter_model.safetensors")
    assert post(sampler, "/v1/load_lora_adapter", {"lora_name": "broken", "lora_path": str(broken)}).is_success
    [values] = scored(sampler, "broken", [[4, 3]])
    assert values[1] is None and values[0] == scored(sampler, "sequence", [[4, 3]])[0][0]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"model": "sequence", "prompt": [3]}, "is a reward model"),
        ("/v1/score", {"model": NAME, "prompts": [[3]]}, "has no head of scalars"),
        ("/v1/score", {"model": "absent", "prompts": [[3]]}, "does not exist"),
        ("/v1/score", {"model": "sequence", "prompts": [[]]}, "a prompt has no tokens"),
        ("/v1/score", {"model": "sequence", "prompts": [[99999]]}, "outside the vocabulary"),
        ("/v1/score", {"model": "sequence", "prompts": []}, "at least 1 item"),
    ],
)
def test_wrong_requests_are_refused(sampler, path, body, words) -> None:
    answer = post(sampler, path, body)
    assert answer.status_code in (400, 404) and words in answer.json()["error"]["message"]


def test_a_head_that_does_not_fit_is_refused(base, rewards, sampler, tmp_path) -> None:
    cut = Path(shutil.copytree(rewards["sequence"], tmp_path / "cut"))
    tensors = load_file(cut / "adapter_model.safetensors")
    tensors["base_model.model.score.weight"] = tensors["base_model.model.score.weight"][:, :-1].clone()
    save_file(tensors, cut / "adapter_model.safetensors")
    answer = post(sampler, "/v1/load_lora_adapter", {"lora_name": "cut", "lora_path": str(cut)})
    assert answer.status_code == 400 and "score.weight" in answer.json()["error"]["message"]
    with http(sampler) as client:
        assert "cut" not in {card["id"] for card in client.get("/v1/models").json()["data"]}
