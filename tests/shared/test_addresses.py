"""Which hosts a user may name without reaching into our own network."""

import ipaddress

import pytest

from shared.addresses import is_plainly_private, is_public


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:169.254.169.254", "64:ff9b::7f00:1", "2002:7f00:1::", "fd00:ec2::254",
    ],
)  # fmt: skip
def test_private_addresses(address) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("inner", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.1.1", "0.0.0.0"])
@pytest.mark.parametrize(
    "form",
    [
        "::{}", "::ffff:{}", "::ffff:0:{}", "64:ff9b::{}", "64:ff9b:1::{}", "64:ff9b:1:7f00:0:1::", "fec0::{}",
        "2606:2800:220:1:0:5efe:{}", "2606:2800:220:1:200:5efe:{}", "2002:{hex}::1", "2002:{hex}:1:2:3:4:5",
        "2001:0:{hex}::1", "2001:0:808:808:0:0:{flipped}",
    ],
)  # fmt: skip
def test_no_form_of_ipv6_carries_a_private_ipv4_address(form: str, inner: str) -> None:
    number = int(ipaddress.IPv4Address(inner))
    flipped = number ^ 0xFFFFFFFF
    address = form.format(
        inner, hex=f"{number >> 16:x}:{number & 0xFFFF:x}", flipped=f"{flipped >> 16:x}:{flipped & 0xFFFF:x}"
    )
    assert not is_public(address)


@pytest.mark.parametrize("address", ["fec0::1", "feff::1", "4000::1", "100::1", "::8.8.8.8", "64:ff9b:1::808:808"])
def test_only_global_unicast_is_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "8.8.8.8", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses(address) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("host", "is_private"),
    [
        ("127.0.0.1", True), ("127.1", True), ("0x7f.1", True), ("2130706433", True), ("::1", True),
        ("::ffff:10.0.0.1", True), ("localhost", True), ("LocalHost.", True), ("a.localhost", True),
        ("8.8.8.8", False), ("2606:2800:220:1::1", False), ("example.org", False), ("localhost.example.org", False),
        ("127.0.0.1.example.org", False), ("", False), ("." * 70, False), ("é", False), ("a" * 300, False),
    ],
)  # fmt: skip
def test_what_is_private_as_it_is_written(host: str, is_private: bool) -> None:
    assert is_plainly_private(host) == is_private
