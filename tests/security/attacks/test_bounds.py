"""The bounds of the stack that is attacked hold for every process of it."""

import resource

from tests.end_to_end.stack import Stack
from tests.security.attacks.bounds import PROCESS_BYTES
from tests.security.attacks.tenants import Tenant


def test_every_process_of_the_stack_is_bounded(stack: Stack) -> None:
    processes = stack.processes()
    assert len(processes) >= 5, processes  # supervisor, Temporal, web service, host, and what the host starts
    for process in processes:
        assert resource.prlimit(process.pid, resource.RLIMIT_AS)[0] == PROCESS_BYTES, process


def test_two_tenants_are_apart(victim: Tenant, attacker: Tenant) -> None:
    uri = victim.upload("rows.jsonl", b'{"text": "ours"}\n')
    assert "/tenants/victim/" in uri
    seen = attacker.http.get("/api/v1/files").json()["files"]
    assert {file["tenant"] for file in seen} <= {"attacker"}
    body = {"model": "org/tiny", "dataset": {"uri": uri}, "steps": 1, "batch_size": 1}
    assert "nothing of yours" in attacker.refusal("sft", **body)
