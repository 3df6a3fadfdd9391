"""What tests/gpu/test_weight_sync.py does on CUDA, here on the CPU; and what samplers refuse of a trainer's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from longshore.training import Transport
from megatron_worker.weight_sync.buckets import Connect, CudaHandle, SyncBroken
from megatron_worker.weight_sync.transports.same_machine import CudaInbound
from tests.megatron_worker.weight_sync.samplers import WAYS
from tests.megatron_worker.weight_sync.two_processes import apart, check_sleep, check_syncs

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
