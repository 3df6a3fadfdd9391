"""Prompts that go on: what is kept of earlier ones changes no bit, and only the rest is computed."""

import threading
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from megatron_worker.sampler.adapters import LoadedAdapter, adapter_of, adapter_shapes
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.generation import Ending, Generator, RequestGroup, Sequence
from megatron_worker.sampler.layers import PROMPT_BLOCK
from megatron_worker.sampler.prefixes import KeptPrefixes
from shared.chat.completions import Sampling
from tests.depth import drawn
from tests.megatron_worker.rows import distinct_model
from tests.megatron_worker.test_sampler_families import CPU, LORAS, ids_of, made

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLING = Sampling(max_tokens=40, ignore_eos=True)
NUM_NEW = 60  # tokens of a tool or a user before each turn but the first
FIRST = 300
AMPLE = 1 << 30


def talk(
    folder: Path, generator: Generator, adapter: LoadedAdapter, num_turns: int = 5, asking: str = ""
) -> list[Sequence]:
    """Draw two samples a turn; the first one's tokens and some new ones go on in the next turn."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt, turns = tuple(ids_of(FIRST)), list[Sequence]()
    for turn in range(num_turns):
        two = [Sequence(prompt, SAMPLING, 2 * turn + j, Ending(SAMPLING, frozenset(), tokenizer)) for j in range(2)]
        for sequence in two:
            sequence.tells_routes = generator.prefixes._decoder.architecture.num_experts > 0
            sequence.num_top, sequence.asking = 2, asking
        generator.submit(group := RequestGroup(adapter, two))
        assert group.done.wait(300)
        turns += two
        prompt = (*prompt, *two[0].token_ids, *ids_of(NUM_NEW, turn))
    return turns


def told(sequence: Sequence) -> object:
    routes = [each.tolist() for each in sequence.routes]
    return sequence.prompt, sequence.token_ids, sequence.raw, sequence.processed, sequence.top, routes


class Loop:
    """A generator that runs in a thread."""

    def __init__(self, decoder: Decoder, kept_bytes: int) -> None:
        self.generator = Generator(decoder, 4, kept_bytes)
        self._thread = threading.Thread(target=self.generator.run, daemon=True)

    def __enter__(self) -> Generator:
        self._thread.start()
        return self.generator

    def __exit__(self, *_: object) -> None:
        self.generator.stop()
        self._thread.join(300)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in ("qwen3", "qwen3_5", "granitemoehybrid", "gpt_oss")),
        *drawn([(family, torch.float32) for family in ("gemma4", "lfm2", "deepseek_v3", "nemotron_h", "stablelm")], 1),
        *drawn([(family, torch.bfloat16) for family in ("qwen3_5_moe", "gpt_oss", "gemma4")], 1),
    ],
    ids=str,
)
def test_a_warm_conversation_has_the_bits_of_a_cold_one(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """Windows, shared keys, sinks, experts and their routes, convolutions, states; and a model of transformers'."""
    folder = made(tmp_path, family)
    decoder = Decoder(folder, dtype, CPU)
    base = LoadedAdapter("base", "", {})
    with Loop(decoder, AMPLE) as warm, Loop(decoder, 0) as cold:
        found, expected = talk(folder, warm, base), talk(folder, cold, base)
        assert list(map(told, found)) == list(map(told, expected))
        before = FIRST
        for one, other in zip(found[2::2], expected[2::2], strict=True):
            num_computed = len(one.prompt) - one.num_reused
            assert 0 < num_computed <= len(one.prompt) - before + PROMPT_BLOCK
            assert one.num_reused % PROMPT_BLOCK == 0 and other.num_reused == 0
            before = len(one.prompt)
        prefixes, num_tokens = warm.prefixes, sum(len(each.prompt) for each in found[::2])
        assert prefixes.num_computed + prefixes.num_reused == num_tokens == cold.prefixes.num_computed
        assert prefixes.num_reused == sum(each.num_reused for each in found[::2]) > num_tokens // 3
        assert cold.prefixes.num_bytes == 0 < prefixes.num_bytes <= warm.cache_bytes


def random_adapter(decoder: Decoder, seed: int) -> LoadedAdapter:
    generator, shapes = torch.Generator().manual_seed(seed), adapter_shapes(decoder, LORAS["all"])
    tensors = {n: torch.randn(shape, generator=generator).abs() / 32 for n, shape in shapes.items()}
    return adapter_of("a", "", LORAS["all"], decoder, tensors)


def test_other_weights_use_nothing_of_what_was_kept(tmp_path: Path) -> None:
    """An adapter beside the model, and then another version of it in its place."""
    folder = distinct_model(tmp_path, "qwen3_5", tied=False)
    decoder = Decoder(folder, torch.float32, CPU)
    base, adapter, later = LoadedAdapter("base", "", {}), random_adapter(decoder, 0), random_adapter(decoder, 1)
    with Loop(decoder, AMPLE) as warm:
        talk(folder, warm, base)
        one = talk(folder, warm, adapter)
        again = talk(folder, warm, adapter)
        assert one[0].num_reused == 0 < again[0].num_reused == PROMPT_BLOCK and told(one[-1]) == told(again[-1])
        warm.change(lambda: adapter.become(later), continues=True)
        found = talk(folder, warm, adapter)
        assert found[0].num_reused == 0
    with Loop(decoder, 0) as cold:
        assert list(map(told, found)) == list(map(told, talk(folder, cold, later)))


def test_nobody_finds_out_what_others_asked(tmp_path: Path) -> None:
    folder = distinct_model(tmp_path, "qwen3", tied=False)
    with Loop(Decoder(folder, torch.float32, CPU), AMPLE) as warm:
        base = LoadedAdapter("base", "", {})
        first, other, again = (talk(folder, warm, base, 1, asking)[0] for asking in ("one", "other", "one"))
    assert (first.num_reused, other.num_reused) == (0, 0) and again.num_reused == PROMPT_BLOCK
    assert told(first) == told(other) == told(again)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_branches_share_their_prefix_and_the_bound_holds(tmp_path: Path, family: str) -> None:
    """Of prompts with a common beginning: the second finds where they part, the third goes on from there."""
    decoder = Decoder(distinct_model(tmp_path, family, tied=False), torch.float32, CPU)
    weights, common = object(), ids_of(2 * PROMPT_BLOCK + 9)
    prompts = [(*common, *ids_of(PROMPT_BLOCK, 10 + branch)) for branch in range(4)]
    prefixes = KeptPrefixes(decoder, AMPLE)
    reused = [prefixes.prefill(weights, prompt, {}).num_reused for prompt in prompts]
    known = 2 * PROMPT_BLOCK
    assert reused == ([0, known, known, known] if family == "qwen3" else [0, 0, known, known])
    whole = prefixes.prefill(weights, prompts[0], {}, is_whole=True)
    assert whole.num_reused == 0 and len(whole.stream_TH) == len(prompts[0])
    # Half of the room: the prompts that were read first are gone, and the last one's beginning is not.
    small = KeptPrefixes(decoder, prefixes.num_bytes // 2)
    for prompt in prompts:
        small.prefill(weights, prompt, {})
        assert small.num_bytes <= prefixes.num_bytes // 2
        assert small.num_bytes == sum(kept.num_bytes for kept in small._kept.values())
    assert small.prefill(weights, prompts[3], {}).num_reused >= known
    small.forget()
    assert small.num_bytes == 0 == small.prefill(weights, prompts[3], {}).num_reused
