"""What tests/gpu/test_weight_sync.py does on CUDA, here on the CPU; and what samplers refuse of a trainer's."""

import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from megatron_worker.weight_sync.bucket_reader import TrainerMessages
from megatron_worker.weight_sync.buckets import (
    Bucket,
    BucketPart,
    Connect,
    CudaHandle,
    RemoteBuffers,
    SyncBroken,
    SyncMessage,
    SyncReply,
)
from megatron_worker.weight_sync.connections import SyncConnection
from megatron_worker.weight_sync.transports.protocol import make_buffers
from megatron_worker.weight_sync.transports.pulled import NixlEngine, PulledInbound
from megatron_worker.weight_sync.transports.same_machine import CudaInbound
from shared.jobs.job import Transport
from tests.megatron_worker.weight_sync.samplers import WAYS, needs
from tests.megatron_worker.weight_sync.two_processes import apart, check_sleep, check_syncs

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, and this is about having none")
CPU = torch.device("cpu")


@NO_CUDA
@pytest.mark.parametrize("transport", WAYS)
def test_two_processes_have_the_same_weights_awake_and_after_sleep(
    model: Path, tmp_path: Path, transport: Transport
) -> None:
    needs(transport)
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
    messages: Any = SimpleNamespace(connection=None)  # it is not used before the buffers are open
    inbound = CudaInbound(CPU)
    inbound.prepare(1 << 20)
    with pytest.raises(SyncBroken, match="1 buffers came, 2 are due"):
        inbound.connect(messages, Connect(handles=(handle(),)))
    with pytest.raises(SyncBroken, match="no buffer of 1048576 bytes on CUDA device 63"):
        inbound.connect(messages, Connect(handles=(handle(), handle())))


def test_buffers_of_other_engines_travel_as_json_and_no_others_are_taken() -> None:
    for endpoint in ("00ff", "127.0.0.1:12001", "[fd00::2]:1"):
        sent = Connect(remote=RemoteBuffers(endpoint=endpoint, addresses=(1, (1 << 64) - 1)))
        assert Connect.model_validate_json(sent.model_dump_json(exclude_defaults=True)) == sent
    for changes in ({"endpoint": "a host:1"}, {"endpoint": "0"}, {"endpoint": "00" * 32769}, {"addresses": (1,)}):
        with pytest.raises(ValueError, match="validation error"):
            RemoteBuffers.model_validate({"endpoint": "00", "addresses": (1, 2)} | changes)
    with pytest.raises(ValueError, match="validation error"):
        RemoteBuffers(endpoint="00", addresses=(0, 1 << 64))


class NeverDone:
    """An engine by which nothing comes."""

    endpoint = "00"

    def __init__(self, host: str, buffers: Sequence[torch.Tensor]) -> None:
        self.is_begun = threading.Event()

    def begin(self, endpoint: str, address: int, into: torch.Tensor) -> None:
        self.is_begun.set()

    def is_done(self) -> bool:
        return False

    def close(self) -> None:
        pass


def test_a_read_that_would_never_end_ends_when_its_trainer_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    engine = NeverDone("", ())
    inbound = PulledInbound(lambda host, buffers: engine, CPU)
    inbound.prepare(1 << 10)
    given = Connect(remote=RemoteBuffers(endpoint="00", addresses=(1, 2)))
    trainer, messages = SyncConnection(theirs, is_trainer=True), TrainerMessages(SyncConnection(ours))
    part = BucketPart(name="a", dtype="float32", shape=(1,), first_row=0, num_rows=1, start=0)
    bucket = Bucket(number=0, parts=(part,), num_bytes=4, checksum=0)
    with pytest.raises(SyncBroken, match="a bucket came before its buffer"):
        inbound.receive(bucket)
    inbound.connect(messages, given)
    assert trainer.read(SyncReply) == SyncReply()
    with pytest.raises(SyncBroken, match="the trainer's buffers are due, once"):
        inbound.connect(messages, given)

    def leave() -> None:
        trainer.write(SyncMessage(bucket=bucket))  # kept for later
        assert engine.is_begun.wait(60)
        trainer.shut()

    threading.Thread(target=leave, daemon=True).start()
    with pytest.raises(SyncBroken, match="the other end is gone"):
        inbound.receive(bucket)
    inbound.finalize()


@pytest.mark.transports
def test_nixl_listens_at_the_interface_alone_by_which_samplers_come() -> None:
    needs("nixl")
    before = listening()
    engine = NixlEngine("127.0.0.1", make_buffers(1 << 10, CPU))
    opened = listening() - before
    assert opened and {host for host, _ in opened} == {"127.0.0.1"}, opened
    engine.close()
    assert listening() <= before, "no longer than a sync lasts"


def listening() -> set[tuple[str, int]]:
    """Addresses at which this process takes TCP connections."""
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}
