"""How ranks talk: with real ranks, and alone."""

import errno

import pytest
import torch.distributed as dist

from megatron_worker.process.ranks import Fault, JobFailed, WorkerRanks, fault_of
from shared.errors import CorruptArtifact, DiskFull, InvalidInput, StoreUnavailable
from tests.megatron_worker.launch import fork_ranks


def test_two_ranks_hear_of_each_others_faults():
    assert fork_ranks("tests.megatron_worker.control_ranks", num_ranks=2).count("agreed") == 2


def test_a_single_rank_needs_nobody():
    ranks = WorkerRanks(dist.HashStore(), rank=0, local_rank=0, world_size=1)
    assert ranks.broadcast(b"x") == b"x"
    assert ranks.total([3]) == ranks.largest([3]) == [3]
    assert ranks.agree(lambda: 7) == 7
    with pytest.raises(JobFailed, match="no such field"):
        ranks.agree(lambda: (_ for _ in ()).throw(InvalidInput("no such field")))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (InvalidInput("too long", "data:3"), "invalid_input", "data:3: too long"),
        (CorruptArtifact("torn", "a.bin"), "corrupt_artifact", "a.bin: torn"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "disk_full", "while writing /x"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "disk_full", "no space is left"),
        (DiskFull("/cache: no space"), "disk_full", "/cache: no space"),
        (StoreUnavailable("s3://b: refused"), "error", "s3://b: refused"),
        (KeyError("x"), "error", "KeyError: 'x'"),
        (JobFailed(Fault(kind="not_finite", message="nan")), "not_finite", "nan"),
    ],
)
def test_errors_become_faults_that_a_user_can_read(error: Exception, kind: str, message: str):
    fault = fault_of(error)
    assert fault.kind == kind
    assert message in fault.message
    assert "Traceback" not in fault.message
