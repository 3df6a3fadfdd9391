"""A sync from an engine to samplers, here or of another process: the same bits, in one version or in none."""

import json
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from longshore.training import Transport
from megatron_worker.dispatch import Dispatcher
from megatron_worker.engine import Where
from megatron_worker.sampler.adapters import load_adapter
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.generation import Ending, RequestGroup, Sequence
from megatron_worker.sampler.models import RequestRefused
from megatron_worker.weight_sync.buckets import (
    Announcement,
    Connect,
    CudaHandle,
    SyncBroken,
    SyncMessage,
    SyncReply,
    device_bytes,
    shapes_sha256,
)
from megatron_worker.weight_sync.connections import connect_locally
from megatron_worker.weight_sync.sender import DeltaBase, send
from megatron_worker.weight_sync.transports.same_machine import Buffers, CudaInbound
from shared.chat.completions import Sampling
from shared.errors import InvalidInput
from shared.jobs.job import SyncAccess, SyncTarget
from shared.models import peft
from shared.storage.artifacts import sha256_file
from shared.storage.files import reachable
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import checkpoint_bytes, start
from tests.megatron_worker.rows import distinct_model, random_rows
from tests.megatron_worker.weight_sync.samplers import NAME, WAYS, access_of, listening, target_of
from tests.megatron_worker.weight_sync.two_processes import apart, check_sleep, check_syncs

STEPS = [[random_rows([40, 17, 90, 25], seed=s)] for s in range(3)]
BUCKET = 1 << 14  # the tiny model needs many


def test_a_stranger_who_does_not_know_the_secret_is_refused_in_bounded_time(model, tmp_path):
    """Neither a wrong secret, another run's, nor silence gets weights in; nor does a run that sends as another."""
    driven = start("megatron", model, "full")
    with listening(model, tmp_path, 1) as [sampler]:
        target = target_of([sampler], 1, "tcp", BUCKET)
        for access in (SyncAccess(), SyncAccess(secret="0" * 64), access_of("another")):
            done = send(driven.outgoing(None), target, "run", None, access).result()
            assert list(done.problems) == [sampler.path] and done.digest is None
        host, port = sampler.address.split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(12)]
        assert [card.id for card in sampler.models.cards().data] == [NAME]
        assert not sync(driven, None, [sampler], 1, "tcp").problems, "those that are silent keep nobody away"
        for one in silent:
            one.close()
        assert all(torch.equal(sampler.tensors()[name], tensor) for name, tensor in driven.named_weights())


def test_a_backend_that_cannot_be_and_a_profile_that_cannot_be_written_are_said(model, tmp_path):
    driven = start("megatron", model, "full")
    with listening(model, tmp_path, 1) as [sampler]:
        refused = sync(driven, None, [sampler], 1, "cuda_ipc")
        assert "cuda_ipc needs cuda, and this is cpu (" in refused.problems[sampler.path]
        target = target_of([sampler], 1, "shared_memory", BUCKET)
        profile = SyncAccess(profile=str(tmp_path / "none" / "trace.json"))
        done = send(driven.outgoing(None), target, "run", None, profile).result()
        assert done.problems == {} and "cannot be written" in done.profile_problem


EXTERNAL = """
from megatron_worker.weight_sync.transports.protocol import TcpInbound, TcpOutbound

ENDS = TcpOutbound, TcpInbound, ("cpu",)
"""


def test_a_transport_of_an_installed_package_is_one_more(model, tmp_path, monkeypatch):
    driven = start("megatron", model, "full")
    with listening(model, tmp_path, 1) as [sampler]:
        refused = sync(driven, None, [sampler], 1, "external").problems[sampler.path]
        assert refused.startswith("ImportError: 0 packages have an entry point")
        (tmp_path / "its_module.py").write_text(EXTERNAL)
        info = tmp_path / "its_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: its-package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[longshore.weight_sync]\nits = its_module:ENDS\n")
        monkeypatch.syspath_prepend(tmp_path)
        done = sync(driven, None, [sampler], 1, "external")
        assert done.problems == {} and done.transport == "external"
        assert all(torch.equal(sampler.tensors()[name], tensor) for name, tensor in driven.named_weights())


def shapes_of(sampler):
    return {name: tuple(tensor.shape) for name, tensor in sampler.tensors().items()}.items()


def num_open():
    return len(list(Path("/proc/self/fd").iterdir()))


def sync(engine, slot, samplers, version, way="shared_memory", sent=None, phases=None, access=None, **how):
    target = target_of(samplers, version, way, BUCKET).model_copy(update=how)
    return send(engine.outgoing(slot), target, "run", sent, access or access_of("run"), phases).result()


def test_the_optimizer_is_on_the_host_during_a_sync_if_memory_is_short(model, tmp_path, engine):
    """The same bits are sent, saved beside it and trained afterwards as with room enough."""
    saved, digests, trace = [], [], tmp_path / "trace.json"
    for is_short in (False, True):
        driven, folder = start(engine, model, "full", "bfloat16"), tmp_path / str(is_short)
        dispatcher, places = Dispatcher(driven), list[Where]()
        needed = device_bytes(driven.outgoing(None), BUCKET)
        dispatcher.free_bytes = lambda device, free=needed - is_short: free
        train(driven, STEPS[:1], learning_rate=1e-3)
        with listening(model, tmp_path, 1, torch.bfloat16) as [sampler], dispatcher.resident(None):
            target, access = target_of([sampler], 1, "shared_memory", BUCKET), SyncAccess(profile=str(trace))
            sending = dispatcher.send_weights(None, "run", target, access)
            assert not is_short or sending._call.is_done(), "a save brings the state back"
            places.append(driven.residency.where("optimizer", None))
            with dispatcher.resident(None):  # as a save does
                places.append(driven.residency.where("optimizer", None))
                driven.save(folder / "saved")
            done = sending.result()
            assert done.problems == {} and done.made_room == is_short
            assert all(torch.equal(sampler.tensors()[name], tensor) for name, tensor in driven.named_weights())
        assert places == ["host" if is_short else "device", "device"]
        assert ("offload" in trace.read_text()) == is_short
        train(driven, STEPS[1:], learning_rate=1e-3)
        driven.save(folder / "trained")
        saved.append([checkpoint_bytes(folder / name) for name in ("saved", "trained")])
        digests.append(done.digest)
    assert saved[0] == saved[1] and digests[0] == digests[1] is not None


@pytest.mark.parametrize("way", [way for way in WAYS if way != "collective"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_weights_are_the_same_in_every_sampler(model, tmp_path, engine, dtype, way):
    driven, sent = start(engine, model, "full", dtype), DeltaBase()
    with listening(model, tmp_path, 2, getattr(torch, dtype)) as samplers:
        for version, rows in enumerate(STEPS):
            train(driven, [rows], learning_rate=1e-5)
            backend = "delta" if version else way
            done = sync(driven, None, samplers, version, backend, sent if version else None)
            assert done.problems == {} and done.version == version
            expected = dict(driven.named_weights())
            for one in samplers:
                found = one.tensors()
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
                assert [card.id for card in one.models.cards().data] == [f"sync-{done.digest}"]
            whole = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
            assert done.weight_bytes == whole
            # The first delta has nothing to go on from; the next one has.
            assert (done.num_bytes < whole) == (version == 2)


def test_one_sampler_without_the_last_version_gets_all_of_it(model, tmp_path):
    driven, sent = start("megatron", model, "full", "bfloat16"), DeltaBase()
    with listening(model, tmp_path, 2, torch.bfloat16) as samplers:
        sync(driven, None, samplers[:1], 1, "delta", sent)
        train(driven, STEPS[:1], learning_rate=1e-5)
        done = sync(driven, None, samplers, 2, "delta", sent)
        assert done.problems == {} and done.num_bytes >= done.weight_bytes
        for one in samplers:
            assert all(torch.equal(one.tensors()[name], tensor) for name, tensor in driven.named_weights())


@pytest.mark.parametrize("kind", ["lora", "dora", "tokens"])
def test_an_adapter_is_what_its_folder_would_be(model, tmp_path, engine, kind):
    driven = start(engine, model, kind)
    train(driven, STEPS, learning_rate=1e-3)
    driven.save(tmp_path / "saved")
    with listening(model, tmp_path, 2) as samplers:
        done = sync(driven, "run", samplers, 1)
        assert done.problems == {}
        expected = load_adapter("a", tmp_path / "saved" / "weights", samplers[0].decoder)
        for one in samplers:
            assert [card.id for card in one.models.cards().data] == [NAME]
            named(one, "run-1", done.digest)
            found = one.models.find("run-1")
            assert found.lora_weights.keys() == expected.lora_weights.keys()
            for name, lora in expected.lora_weights.items():
                assert torch.equal(found.lora_weights[name].a_RI, lora.a_RI)
                assert torch.equal(found.lora_weights[name].b_OR, lora.b_OR)
                assert found.lora_weights[name].scale == lora.scale
                if kind == "dora":
                    assert torch.equal(found.lora_weights[name].gain_O, lora.gain_O)
        with pytest.raises(RequestRefused, match="no weights of this digest"):
            named(samplers[0], "run-2", "0" * 64)


def test_an_adapter_is_named_by_its_content_alone(model, tmp_path, engine):
    """Whoever has an adapter's files finds the one that its trainer has sent, and no other: not of another scale."""
    driven = start(engine, model, "lora")
    train(driven, STEPS, learning_rate=1e-3)
    driven.save(tmp_path / "saved")
    folder = tmp_path / "saved" / "weights"
    config, file = peft.read_config(folder), sha256_file(folder / peft.WEIGHTS)
    with listening(model, tmp_path, 1) as [sampler]:
        done = sync(driven, "run", [sampler], 1)
        other = config.model_copy(update={"alpha": config.alpha * 2})
        with pytest.raises(RequestRefused, match="no weights of this digest"):
            named(sampler, "other", peft.content_sha256(other, file))
        for _ in range(500):  # its content is known a moment after the trainer's last answer
            with suppress(RequestRefused):
                named(sampler, "a", peft.content_sha256(config, file))
                break
            time.sleep(0.01)
        assert sampler.models.find("a").weights_sha256() == load_adapter("b", folder, sampler.decoder).weights_sha256()
        assert sampler.models.find("a").drawn_by.policy_version is None
        with pytest.raises(RequestRefused, match="no weights of this digest"):
            named(sampler, "again", done.digest)


def test_of_adapters_that_nobody_names_the_newest_of_a_run_stays_and_no_run_takes_all_room(model, tmp_path):
    driven = start("megatron", model, "lora")
    with listening(model, tmp_path, 1) as [sampler]:
        first, *_, last = [train_and_sync(driven, sampler, "a", version) for version in range(12)]
        others = [train_and_sync(driven, sampler, f"run-{number}", 0) for number in range(7)]
        assert len(sampler.models.adapters()) == 8
        for digest in (last, *others):
            named(sampler, digest[:8], digest)
        with pytest.raises(RequestRefused, match="no weights of this digest"):
            named(sampler, "first", first)


def train_and_sync(driven, sampler, run_id, version):
    train(driven, STEPS[:1], learning_rate=1e-3)
    target = target_of([sampler], version, "shared_memory", BUCKET)
    return send(driven.outgoing("run"), target, run_id, None, access_of(run_id)).result().digest


def named(sampler, name, digest):
    sampler.models.name_weights(json.dumps({"name": name, "digest": digest}).encode())


class Killed(Exception):
    pass


class At:
    """Phases that do something when one begins."""

    def __init__(self, phase, action):
        self.phase, self.action, self.seen = phase, action, []

    @contextmanager
    def __call__(self, name):
        self.seen.append(name)
        if name == self.phase:
            self.action()
        yield

    def end(self, *_: object) -> None:
        return None


def die():
    raise Killed


@pytest.mark.parametrize("way", WAYS)
def test_a_sync_that_breaks_leaves_no_weights_to_sample_from(model, tmp_path, way):
    """The trainer is gone after a bucket: the sampler refuses to draw until it has whole weights again."""
    driven = start("megatron", model, "full")
    with listening(model, tmp_path, 1) as [sampler]:
        with pytest.raises(Killed):
            sync(driven, None, [sampler], 1, way, phases=At("fill 3", die))
        deadline = threading.Event()
        while sampler.models.cards().data:
            assert not deadline.wait(0.01)
        with pytest.raises(RequestRefused, match="not complete") as refused:
            sampler.models.find(NAME)
        assert refused.value.status == 503
        assert sync(driven, None, [sampler], 1, way).problems == {}
        assert all(torch.equal(sampler.tensors()[name], tensor) for name, tensor in driven.named_weights())


def test_weights_of_another_model_older_versions_and_small_buckets_are_refused(model, tmp_path):
    other = start("megatron", distinct_model(tmp_path, "llama", False), "full")
    driven = start("megatron", model, "full")
    with listening(model, tmp_path, 1) as [sampler]:
        before = {name: tensor.clone() for name, tensor in sampler.tensors().items()}
        assert "another model" in sync(other, None, [sampler], 1).problems[sampler.path]
        assert [card.id for card in sampler.models.cards().data] == [NAME]
        assert all(torch.equal(sampler.tensors()[name], tensor) for name, tensor in before.items())
        assert sync(driven, None, [sampler], 5).problems == {}
        assert "comes after version 5" in sync(driven, None, [sampler], 4).problems[sampler.path]
        assert sync(driven, None, [sampler], 5).problems == {}, "a step that is repeated sends its version again"
        too_small = SyncTarget.model_construct(
            sockets=(sampler.path,), version=6, backend="shared_memory", bucket_bytes=64
        )
        with pytest.raises(InvalidInput, match="which a bucket of 64 does not hold"):
            send(driven.outgoing(None), too_small, "run")
        away = replace(sampler, path=str(tmp_path / "none.sock"))
        missing = sync(driven, None, [away], 6)
        assert "no sampler of this machine" in missing.problems[away.path]
        assert missing.digest is None


def test_what_is_no_message_does_no_harm(model, tmp_path):
    with listening(model, tmp_path, 1) as [sampler]:
        for data in (b"", b"\xff" * 4, b"\0\0\0\x05hello", b"\0\0\0\x02{}" * 3):
            connection = socket.socket(socket.AF_UNIX)
            with reachable(Path(sampler.path)) as short:
                connection.connect(short)
            connection.sendall(data)
            connection.close()
        connection = connect_locally(sampler.path)
        large = Announcement(
            run_id="run", version=0, shapes_sha256=shapes_sha256(shapes_of(sampler)), buffer_bytes=1 << 30
        )
        connection.write(large)
        assert connection.read(SyncReply) == SyncReply(needs_all=True)
        connection.write(SyncMessage(connect=Connect()))
        few = Buffers(BUCKET)
        socket.send_fds(connection.socket, [b"\0"], few.descriptors)
        few.close()
        with pytest.raises(SyncBroken):
            connection.read(SyncReply)
        connection.close()
        assert [card.id for card in sampler.models.cards().data] == [NAME]
        assert sync(start("megatron", model, "full"), None, [sampler], 1).problems == {}


def test_buffers_that_no_memory_is_left_for_are_refused():
    before = num_open()
    with pytest.raises(OSError, match=r"no 2 shared buffers of \d+ bytes: \d+ bytes of memory are left"):
        Buffers(1 << 50)
    assert num_open() == before


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_open(model, tmp_path, way):
    driven = start("megatron", model, "full")
    with listening(model, tmp_path, 1) as [sampler]:
        assert sync(driven, None, [sampler], 0, way).problems == {}  # what a process opens once
        before = num_open()
        for version in range(5):
            assert sync(driven, None, [sampler], version, way).problems == {}
        deadline = time.monotonic() + 60
        while num_open() > before:  # the sampler closes its end when it has answered
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_folders_take_the_place_of_weights(model, tmp_path):
    driven = start("megatron", model, "full")
    train(driven, STEPS[:1], learning_rate=1e-3)
    driven.save(tmp_path / "saved")
    with listening(model, tmp_path, 1) as [sampler]:
        folder = tmp_path / "saved" / "weights"
        sampler.models.load_weights(json.dumps({"name": "v1", "path": str(folder)}).encode())
        expected = Decoder(folder, torch.float32, torch.device("cpu")).named_weights()
        assert all(torch.equal(sampler.tensors()[name], tensor) for name, tensor in expected.items())
        assert [card.id for card in sampler.models.cards().data] == ["v1"]
        with pytest.raises(RequestRefused, match="has no config"):
            sampler.models.load_weights(json.dumps({"name": "v2", "path": str(tmp_path)}).encode())
        assert sampler.models.find("v1")


def test_samples_under_way_end_on_the_old_weights_and_later_ones_wait(model, tmp_path):
    driven = start("megatron", model, "full")
    train(driven, STEPS[:1], learning_rate=1e-2)
    with listening(model, tmp_path, 1) as [sampler]:
        base, tokenizer = sampler.models.find(NAME), Tokenizer.from_file(str(model / "tokenizer.json"))

        def ticket(max_tokens, num_changes):
            sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, temperature=0)
            sequence = Sequence((5, 6), sampling, 0, Ending(sampling, frozenset(), tokenizer))
            submitted = RequestGroup(base, [sequence], num_changes)
            sampler.generator.submit(submitted)
            return submitted

        alone = ticket(40, 0)
        assert alone.done.wait(300)
        under_way = ticket(40, 0)
        done = sync(driven, None, [sampler], 1)
        assert done.problems == {} and under_way.done.is_set(), "weights change when nothing is drawn"
        assert under_way.sequences[0].token_ids == alone.sequences[0].token_ids
        late = ticket(40, 0)
        assert late.done.wait(300) and late.is_late and not late.sequences[0].token_ids
        after = ticket(40, sampler.generator.num_changes)
        assert after.done.wait(300) and after.sequences[0].token_ids != alone.sequences[0].token_ids


def test_a_step_that_changed_nothing_is_a_version_too(model, tmp_path):
    driven, sent = start("megatron", model, "full", "bfloat16"), DeltaBase()
    with listening(model, tmp_path, 1, torch.bfloat16) as samplers:
        first = sync(driven, None, samplers, 1, "delta", sent)
        second = sync(driven, None, samplers, 2, "delta", sent)
        assert second.problems == {} and second.num_bytes == 0 and second.digest == first.digest
        with pytest.raises(RequestRefused, match="does not exist"):
            samplers[0].models.find(NAME)
        named(samplers[0], "v2", second.digest)
        assert samplers[0].models.find("v2")


NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, and this is about having none")


@NO_CUDA
@pytest.mark.parametrize("transport", WAYS)
def test_two_processes_have_the_same_weights_awake_and_after_sleep(
    model: Path, tmp_path: Path, transport: Transport
) -> None:
    with apart(model, tmp_path, "cpu") as sampler:
        check_syncs(sampler, model, tmp_path, transport)
        check_sleep(sampler)


def handle(**changes: Any) -> CudaHandle:
    given = {"device": 63, "handle": "00ff", "storage_bytes": 1 << 20, "storage_offset_bytes": 512}
    rest = {"counter_handle": b"/torch_1_2".hex(), "counter_offset": 0, "event_handle": "", "needs_event": False}
    return CudaHandle.model_validate(given | rest | changes)


def test_handles_travel_as_json_and_those_of_no_such_buffer_are_refused() -> None:
    sent = Connect(handles=(handle(), handle(storage_bytes=0)))
    assert Connect.model_validate_json(sent.model_dump_json(exclude_defaults=True)) == sent
    for changes in ({"handle": "0g"}, {"handle": "0"}, {"device": -1}, {"handle": "00" * 513}, {"needs_event": "x"}):
        with pytest.raises(ValueError, match="validation error"):
            handle(**changes)
    unused: Any = None  # before the buffers are open
    inbound = CudaInbound(torch.device("cpu"), 1 << 20)
    with pytest.raises(SyncBroken, match="1 buffers came, 2 are due"):
        inbound.connect(unused, Connect(handles=(handle(),)))
    with pytest.raises(SyncBroken, match="no buffer of 1048576 bytes on CUDA device 63"):
        inbound.connect(unused, Connect(handles=(handle(), handle())))
