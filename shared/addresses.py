"""Hosts that a user names: which are on the public internet, and which are this machine or a neighbour of it."""

import ipaddress
import socket

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an IP address is on the public internet, and so is every IPv4 address that it wraps."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        wrapped = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in _NAT64:
            wrapped.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        if any(inner is not None for inner in wrapped):
            return all(is_public(str(inner)) for inner in wrapped if inner is not None)
    return ip.is_global and not ip.is_multicast


def is_plainly_private(host: str) -> bool:
    """Whether a host is a private address as it is written, in any spelling that connecting would take, or localhost.

    No name is looked up: what one resolves to counts when it is connected to, and not before.
    """
    if host.lower().rstrip(".").rpartition(".")[2] == "localhost":
        return True
    try:
        found = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    return not all(is_public(str(address[0])) for _, _, _, _, address in found)


def private_host(setting: str) -> str:
    """What is said of a host that is not on the public internet: the rule, and the setting that opens it."""
    return f"this host is on a private network; a trusted one is opened with {setting}"
