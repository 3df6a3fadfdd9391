"""Slots of the sampler's batch: equal to the bit, fewer where they are not, and free again when a client leaves."""

import threading
import time
from dataclasses import replace

import torch
from tokenizers import Tokenizer

from longshore.training import LINEARS
from megatron_worker.sampler.adapters import LoadedAdapter, load_adapter
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.generation import Ending, Generator, Sequence, Ticket, reliable_width, shapes_of
from shared.chat.completions import Sampling
from tests.megatron_worker.sampler_process import NAME, write_adapter


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
        def step(self, token_B, position_B, num_blocks, cache, lora_weights, chosen=None):
            hidden_BH = super().step(token_B, position_B, num_blocks, cache, lora_weights, chosen).clone()
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
        submitted = Ticket(base, sequences)
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
