"""Weights that change while samples are drawn, and whoever is killed or cut off meanwhile: nothing half-loaded is used.

Samplers that are killed are processes of their own. A trainer that is gone is, to a sampler, the end of its
connections, which is what an exception in a phase leaves behind.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.generation import Ending, RequestGroup, Sequence
from megatron_worker.sampler.models import RequestRefused
from megatron_worker.weight_sync import connections
from megatron_worker.weight_sync.connections import accept_remotely
from megatron_worker.weight_sync.transports.collective import SyncGroup
from shared.chat.completions import Sampling
from shared.jobs.job import SyncAccess, SyncTarget
from tests import forks
from tests.depth import drawn
from tests.forks import Program
from tests.machines import made
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.launch import REPOSITORY, environment
from tests.megatron_worker.rows import random_rows
from tests.megatron_worker.weight_sync import samplers as here
from tests.megatron_worker.weight_sync.samplers import KEY, NAME, WAYS, WITHOUT_GROUP, Listening, listening
from tests.megatron_worker.weight_sync.test_sync import BUCKET, STEPS, At, Killed, die, sync

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


# The last two: the version is whole, and the sampler may have it.
PHASES = ["prepare", "connect", "settle 0", "fill 0", "send 0", "send 1", "settle 3", "settle", "commit", "finalize"]


def listen_apart(model, folder):
    """A sampler's process: it says its address, and waits to be killed."""
    with listening(model, folder, 1) as [sampler]:
        (folder / "address.tmp").write_text(f"{sampler.path}\n{sampler.address}")
        (folder / "address.tmp").rename(folder / "address")
        threading.Event().wait()


@contextlib.contextmanager
def apart(model, folder, listen=listen_apart):
    """A sampler in a process of its own, as (path, address, pid)."""
    folder.mkdir()
    said = folder / "said"
    program = Program(partial(listen, model, folder), sys.argv, environment(), REPOSITORY, said, said)
    with forks.running(program) as process:
        while not (folder / "address").exists():
            assert process.is_alive(), said.read_text()
            time.sleep(0.02)
        path, address = (folder / "address").read_text().splitlines()
        yield Listening(None, None, None, path, address), process.pid


def equal(sampler, driven):
    return all(torch.equal(sampler.tensors()[name], tensor) for name, tensor in driven.named_weights())


@pytest.mark.drawn
@pytest.mark.parametrize("way", WITHOUT_GROUP)
def test_a_sampler_killed_in_any_phase_costs_the_other_nothing(model, tmp_path, way):
    """The survivor gets every tensor to the bit, in the same sync; the trainer names the one that is lost."""
    driven = start("megatron", model, "full")
    phases = drawn(["connect", "fill 0", "send 1", "settle 3", "commit"], 2)
    with listening(model, tmp_path, 1) as [survivor]:
        for version, phase in enumerate(phases):
            train(driven, [[random_rows([17], seed=version)]], learning_rate=1e-4)
            with apart(model, tmp_path / phase.replace(" ", "-")) as (victim, pid):
                kill = At(phase, lambda pid=pid: os.kill(pid, signal.SIGKILL))
                done = sync(driven, None, [victim, survivor], version, way, phases=kill)
            assert phase in kill.seen
            assert set(done.problems) <= {victim.path} and (phase == "commit" or done.problems), done.problems
            assert equal(survivor, driven)
            assert [card.id for card in survivor.models.cards().data] == [f"sync-{done.digest}"]


@pytest.mark.drawn
@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_gone_in_any_phase_leaves_the_old_weights_or_the_new_or_none(model, tmp_path, way):
    driven = start("megatron", model, "full")
    with listening(model, tmp_path, 1) as [sampler]:
        before = {name: tensor.clone() for name, tensor in sampler.tensors().items()}
        for version, phase in enumerate(drawn(PHASES, 4)):
            assert sync(driven, None, [sampler], 2 * version, way).problems == {}
            [old] = [card.id for card in sampler.models.cards().data]
            before = {name: tensor.clone() for name, tensor in sampler.tensors().items()}
            train(driven, [[random_rows([17], seed=version)]], learning_rate=1e-4)
            with pytest.raises(Killed):
                sync(driven, None, [sampler], 2 * version + 1, way, phases=At(phase, die))
            with sampler.models._syncing:  # its end of the sync is over
                names = [card.id for card in sampler.models.cards().data]
            if names == [old]:
                assert phase in PHASES[:6]  # until it has begun to write, which nothing of it waits for
                assert all(torch.equal(sampler.tensors()[name], tensor) for name, tensor in before.items())
            elif names:
                assert phase == "finalize" and equal(sampler, driven)
            else:
                with pytest.raises(RequestRefused, match="not complete"):
                    sampler.models.find(old)


@pytest.mark.parametrize("way", WITHOUT_GROUP)
def test_a_cut_connection_is_the_loss_of_one_sampler(model, tmp_path, way):
    """The link to one sampler is cut at a bucket; the other has the version, and the cut one nothing that is named."""
    driven = start("megatron", model, "full")
    with listening(model, tmp_path, 2) as [cut, kept]:
        sending = []

        def cut_the_first():
            sending[0].outbound.living[0].connection.shut()

        phases = At("fill 2", cut_the_first)
        paths = SyncTarget(
            sockets=(cut.path, kept.path),
            addresses=(cut.address, kept.address),
            version=1,
            backend=way,
            bucket_bytes=BUCKET,
        )
        started = threading.Event()
        gate = At("prepare", lambda: started.wait(30))

        class Both(At):
            @contextlib.contextmanager
            def __call__(self, name):
                with gate(name), phases(name):
                    yield

        both = Both("", None)
        sending.append(here_send(driven, paths, both))
        started.set()
        done = sending[0].result()
        assert list(done.problems) == [cut.path]
        assert equal(kept, driven)
        with cut.models._syncing:
            assert cut.models.cards().data == []


def test_a_group_is_left_while_a_broadcast_is_under_way():
    """Whoever leaves does not wait for a broadcast to end that nobody sends. Several times: threads must not race."""
    for _ in range(5):
        store = dist.HashStore()
        with ThreadPoolExecutor(2) as threads:
            joining = [threads.submit(SyncGroup, store, rank, 2, torch.device("cpu"), "127.0.0.1") for rank in range(2)]
            root, waiting = (future.result() for future in joining)
        del joining
        work = waiting.broadcast(torch.zeros(8), 0)
        waiting.drop()
        assert not work.is_completed()
        root.drop()


@pytest.mark.parametrize("phase", drawn(["connect", "fill 0", "send 1", "settle 3"], 1))
def test_a_group_that_loses_a_member_ends_the_sync_of_all(model, tmp_path, phase):
    """Nobody names half of a version, and the other one gets the next."""
    driven = start("megatron", model, "full")
    with listening(model, tmp_path, 1) as [survivor]:
        with apart(model, tmp_path / "victim") as (victim, pid):
            kill = At(phase, lambda: os.kill(pid, signal.SIGKILL))
            done = sync(driven, None, [victim, survivor], 1, "collective", phases=kill)
        lost = {victim.path} if phase == "connect" and done.digest else {victim.path, survivor.path}
        assert done.problems.keys() == lost and (done.digest is None) == (survivor.path in lost)
        with survivor.models._syncing:  # its end of the sync is over
            names = [card.id for card in survivor.models.cards().data]
        assert survivor.path not in lost or names in ([], [NAME])
        assert sync(driven, None, [survivor], 2, "collective").problems == {}
        assert equal(survivor, driven)


def here_send(driven, target, phases):
    from megatron_worker.weight_sync.sender import send

    return send(driven.outgoing(None), target, "run", None, here.access_of("run"), phases)


def sampler_at(machines, name, model, folder, opened):
    folder.mkdir()
    host = machines.addresses[name]
    [one] = machines.on(name, lambda: opened.enter_context(listening(model, folder, 1)))
    return replace(one, address=machines.on(name, lambda: accept_remotely(host, KEY, one.models.receive)))


@pytest.fixture
def machines():
    with made("trainer", "first", "second", "stranger") as machines:
        yield machines


@pytest.fixture
def quick(monkeypatch):
    """A link is given up after seconds."""
    monkeypatch.setattr(connections, "_LINK_S", 6)


def test_weights_travel_between_machines_whatever_happens_to_a_link(model, tmp_path, machines, quick):
    driven = start("megatron", model, "full")
    with ExitStack() as opened:
        samplers = [sampler_at(machines, name, model, tmp_path / name, opened) for name in ("first", "second")]

        def synced(version, at=None):
            train(driven, [STEPS[version % len(STEPS)]], learning_rate=1e-3)
            return machines.on("trainer", lambda: sync(driven, None, samplers, version, "tcp", phases=at))

        def cut():
            machines.link("first", "down")

        def cut_for_a_moment():
            cut()
            threading.Timer(1.0, machines.link, ("first", "up")).start()

        assert synced(1).problems == {}
        at = At("fill 3", cut_for_a_moment)
        assert synced(2, at).problems == {} and "fill 3" in at.seen
        assert all(equal(one, driven) for one in samplers), "what was lost on the way has come again"

        first, second = samplers
        lost = synced(3, At("fill 3", cut))
        assert list(lost.problems) == [first.path] and lost.digest is not None
        assert equal(second, driven)
        with first.models._syncing:  # its end of the sync is over
            assert first.models.cards().data == []

        machines.link("first", "up")
        assert synced(4).problems == {}
        assert all(equal(one, driven) for one in samplers)


def test_a_stranger_on_a_third_machine_is_refused(model, tmp_path, machines):
    driven = start("megatron", model, "full")
    with ExitStack() as opened:
        sampler = sampler_at(machines, "first", model, tmp_path / "first", opened)
        before = {name: tensor.clone() for name, tensor in sampler.tensors().items()}
        train(driven, STEPS[:1], learning_rate=1e-3)
        for access in (SyncAccess(), SyncAccess(secret="0" * 64)):
            refused = machines.on("stranger", lambda a=access: sync(driven, None, [sampler], 1, "tcp", access=a))
            assert list(refused.problems) == [sampler.path] and refused.digest is None
            assert "no sampler listens" not in refused.problems[sampler.path], "it is reached, and refuses"
        assert all(torch.equal(sampler.tensors()[name], tensor) for name, tensor in before.items())
        assert machines.on("trainer", lambda: sync(driven, None, [sampler], 1, "tcp")).problems == {}
        assert equal(sampler, driven)
