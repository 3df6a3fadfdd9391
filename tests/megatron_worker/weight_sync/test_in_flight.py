"""Weights that change while samples are drawn: which version drew each token, with which probability."""

import json
import threading
import time

import pytest
import torch
from tokenizers import Tokenizer

from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.generation import Ending, RequestGroup, Sequence
from megatron_worker.sampler.models import RequestRefused
from shared.chat.completions import Sampling
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.weight_sync.samplers import listening
from tests.megatron_worker.weight_sync.test_sync import STEPS, At, Killed, die, sync

NEWEST = "run-newest"


@pytest.fixture
def draw(model):
    """Submits samples to a sampler, which end after so many tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def submit(sampler, max_tokens, num=2, is_held=None):
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        ending = is_held or Ending(sampling, frozenset(), tokenizer)
        sequences = [Sequence((5, 6, 7 + seed), sampling, seed, ending) for seed in range(num)]
        ticket = RequestGroup(sampler.models.find(NEWEST), sequences, sampler.generator.num_changes)
        sampler.generator.submit(ticket)
        return ticket

    return submit


class HeldEnding:
    """Holds samples after so many tokens until the test lets them go on, however fast they are drawn."""

    def __init__(self, ending, at):
        self.ending, self.at, self.reached, self.may_go_on = ending, at, threading.Event(), threading.Event()

    def end_behind(self, token_ids):
        if len(token_ids) == self.at:
            self.reached.set()
            assert self.may_go_on.wait(300)
        return self.ending.end_behind(token_ids)


@pytest.fixture
def held(model):
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    return HeldEnding(Ending(sampling, frozenset(), Tokenizer.from_file(str(model / "tokenizer.json"))), at=12)


def update(sampler, version, path=None, lora=False):
    body = {"name": NEWEST, "version": version, "lora": lora, "path": None if path is None else str(path)}
    return sampler.models.update_weights(json.dumps(body).encode())


def begin(sampler, model, kind):
    """Have the model as it is stand for the policy before the first step."""
    update(sampler, 0, None if kind == "lora" else model, kind == "lora")


def has_come(sampler):
    """Wait until a change of weights waits behind the token that is held."""
    while sampler.generator._arrivals.empty():
        time.sleep(0.01)


def card(sampler):
    return next(one for one in sampler.models.cards().data if one.id == NEWEST)


def logprobs(decoder, lora_weights, sequence):
    """Of every drawn token, by these weights, given all before it."""
    ids = (*sequence.prompt, *sequence.token_ids)
    found = decoder.score(ids, decoder.prefill(ids, lora_weights)).logprobs
    return torch.tensor(found[len(sequence.prompt) - 1 :])


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_every_token_says_which_version_drew_it_and_has_its_logprob(model, tmp_path, held, draw, kind):
    driven = start("megatron", model, kind)
    with listening(model, tmp_path, 1) as [sampler]:
        begin(sampler, model, kind)
        under_way = draw(sampler, 40, is_held=held)
        assert held.reached.wait(300)
        train(driven, STEPS, learning_rate=1e-2)
        slot = None if kind == "full" else "run"
        sending = threading.Thread(target=sync, args=(driven, slot, [sampler], 1), kwargs={"name": NEWEST})
        sending.start()
        has_come(sampler)
        later = draw(sampler, 3)
        held.may_go_on.set()
        assert under_way.done.wait(300) and later.done.wait(300)
        sending.join(300)
        old = Decoder(model, torch.float32, torch.device("cpu"))
        new_lora = sampler.models.find(NEWEST).lora_weights
        for sequence in under_way.sequences:
            versions = [each.policy_version for each in sequence.drawn_by]
            assert versions == [0] * 12 + [1] * 28
            drawn, first, then = (
                torch.tensor(sequence.raw),
                logprobs(old, {}, sequence),
                logprobs(sampler.decoder, new_lora, sequence),
            )
            torch.testing.assert_close(drawn[:12], first[:12], atol=1e-5, rtol=0)
            torch.testing.assert_close(drawn[12:], then[12:], atol=1e-5, rtol=0)
            assert (first - then).abs().max() > 0.01, "the versions differ, or this shows nothing"
        assert {each.policy_version for each in later.sequences[0].drawn_by} == {1}
        assert card(sampler).policy_version == 1
        assert {each.weights_sha256 for each in later.sequences[0].drawn_by} == {card(sampler).weights_sha256}


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_equal_weights_have_one_hash_however_they_came(model, tmp_path, kind):
    """By a sync, as changes, and from a folder. An older version never takes the place of a newer one."""
    driven, slot = start("megatron", model, kind), None if kind == "full" else "run"
    train(driven, STEPS[:1], learning_rate=1e-3)
    driven.save(tmp_path / "saved")
    weights = tmp_path / "saved" / "weights"
    with listening(model, tmp_path, 2) as samplers:
        first, second = samplers
        begin(first, model, kind)
        before = card(first).weights_sha256
        assert sync(driven, slot, [first], 3, name=NEWEST).problems == {}
        update(second, 3, weights, kind == "lora")
        assert card(first).weights_sha256 == card(second).weights_sha256 != before
        assert card(first).policy_version == card(second).policy_version == 3
        assert "is not older" in update(first, 2, tmp_path / "nowhere", kind == "lora")
        with pytest.raises(RequestRefused, match=r"cannot be used|no model is at"):
            update(first, 4, tmp_path / "nowhere", kind == "lora")
        assert card(first).policy_version == 3


def test_samples_under_weights_that_are_lost_are_asked_again(model, tmp_path, held, draw):
    """The trainer dies after a bucket: nobody gets a sample that was drawn from half of a version."""
    driven = start("megatron", model, "full")
    with listening(model, tmp_path, 1) as [sampler]:
        begin(sampler, model, "full")
        under_way = draw(sampler, 40, is_held=held)
        assert held.reached.wait(300)

        def killed():
            with pytest.raises(Killed):
                sync(driven, None, [sampler], 1, phases=At("fill 2", die), name=NEWEST)

        sending = threading.Thread(target=killed)
        sending.start()
        has_come(sampler)
        queued = draw(sampler, 3)
        held.may_go_on.set()
        sending.join(300)
        assert under_way.done.wait(300) and queued.done.wait(300)
        assert under_way.is_late and queued.is_late and not queued.sequences[0].token_ids
        with pytest.raises(RequestRefused, match="not complete"):
            sampler.models.find(NEWEST)
        update(sampler, 1, model)
        assert draw(sampler, 3).done.wait(300)


def test_held_weights_stay_until_they_are_let_go(model, tmp_path):
    """Between two requests of one step, too. A trainer that does not wait is refused, and nothing is replaced."""
    driven = start("megatron", model, "full")
    train(driven, STEPS[:1], learning_rate=1e-3)
    with listening(model, tmp_path, 1) as [sampler]:
        before = sampler.models.cards().data[0]
        with sampler.models.held():
            refused = sync(driven, None, [sampler], 1, waits=False)
            assert "still to be drawn" in refused.problems[sampler.path] and refused.digest is None
            sending = threading.Thread(target=sync, args=(driven, None, [sampler], 1))
            sending.start()
            sending.join(0.5)
            assert sending.is_alive() and sampler.models.cards().data == [before]
        sending.join(300)
        assert sampler.models.cards().data[0].weights_sha256 != before.weights_sha256
