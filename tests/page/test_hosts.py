"""The page of hosts: what each is, does and lacks."""

import re
import time

from shared.storage.host_states import Devices, HostState, delete_state, write_state
from tests.page.guest import Browser, Guest, expect
from tests.service.conftest import Service


def test_hosts_are_listed_and_told_apart(browser: Browser, service: Service, acme: str) -> None:
    """Two of one machine differ by their ids; another tenant sees no machine's name."""
    now, shape = time.time(), service.settings.shape

    def host(own_id: str, **more) -> HostState:
        queue = f"host-quay-{own_id}"
        return HostState(**{"role": "gpu", "shape": shape, "name": "quay", "queue": queue, "seen_at": now} | more)

    devices = Devices(number=8, num_bytes=80 << 30)
    states = [
        host("11111111aaaa", devices=devices, max_ranks=8, lease_since=now - 754),
        host("22222222bbbb", devices=devices, max_ranks=8),
        host("33333333cccc", role="sampler", lacks=("torch is not installed",)),
    ]
    for state in states:
        write_state(service.store, state)
    with service.http() as api:
        [gpu] = [each for each in api.get("/hosts").json() if each["role"] == "gpu"]
    assert {(each["name"], each["id"]) for each in gpu["hosts"]} == {("quay", "11111111"), ("quay", "22222222")}
    guest = Guest(browser, service.url)
    guest.page.goto("/hosts")
    rows = guest.page.locator("#hosts tbody tr")
    expect(rows).to_have_count(3)
    working, waiting, broken = (rows.filter(has_text=state.id) for state in states)
    expect(working).to_contain_text(re.compile(rf"quay.*GPU.*{shape}.*8 . 80.0 GiB.*has been working for 12 min"))
    expect(waiting).to_contain_text("idle")
    expect(broken).to_contain_text(re.compile("Sampler.*takes no runs.*torch is not installed"))
    expect(guest.page.locator("#roles")).to_contain_text(
        re.compile("Control hosts[1-9].*GPU hosts2 up.*Sampler hosts1 up")
    )
    assert guest.troubles == []
    guest.context.close()
    other = Guest(browser, service.url, acme)
    other.page.goto("/hosts")
    expect(other.page.locator("#hosts tbody tr")).to_have_count(3)
    assert "quay" not in other.page.locator("main").inner_text()
    other.context.close()
    for state in states:
        delete_state(service.store, state)
