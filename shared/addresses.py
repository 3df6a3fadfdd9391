"""Classifies hosts that a user names: on the public internet, or on this machine or its private networks."""

import ipaddress
import socket

_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""The only IPv6 range that is routed on the internet (RFC 4291, 2.4). All other IPv6 addresses count as local."""
_MAPPED = ipaddress.ip_network("::ffff:0:0/96")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)
"""Upper 32 bits of an ISATAP interface id; the lower 32 are an IPv4 address (RFC 5214, 6.1)."""


def is_public(address: str) -> bool:
    """Return True if an IP address is on the public internet, and so is every IPv4 address embedded in it."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.is_global and not ip.is_multicast
    carried = _carried(ip)
    if ip in _MAPPED or ip in _NAT64:
        return all(map(is_public, carried))
    # The ranges of 6to4 and Teredo are not global to `ipaddress`: the IPv4 addresses embedded in them decide.
    is_global = ip.is_global or ip.sixtofour is not None or ip.teredo is not None
    return ip in _GLOBAL_UNICAST and is_global and all(map(is_public, carried))


def _carried(ip: ipaddress.IPv6Address) -> list[str]:
    """Return the IPv4 addresses embedded in an IPv6 address: a gateway or tunnel would send its packets to them."""
    found = [ip.sixtofour, *(ip.teredo or ())]
    last = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if ip in _MAPPED or ip in _NAT64 or (int(ip) >> 32) & 0xFFFFFFFF in _ISATAP:
        found.append(last)
    return [str(inner) for inner in found if inner is not None]


def is_plainly_private(host: str) -> bool:
    """Return True for localhost and for private IP addresses, in any notation that the operating system accepts.

    Host names are not resolved here: the addresses behind them are checked when a connection is made.
    """
    if host.lower().rstrip(".").rpartition(".")[2] == "localhost":
        return True
    try:
        found = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    return not all(is_public(str(address[0])) for _, _, _, _, address in found)


def private_host(setting: str) -> str:
    """Return the message for a host that is not on the public internet: the rule, and the setting that allows it."""
    return f"this host is on a private network; a trusted one is opened with {setting}"
