"""Limits in this process: token buckets for requests and sign-ins, and each tenant's share of common resources."""

import asyncio
import hashlib
import ipaddress
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from shared.errors import Busy
from shared.settings import RateLimitSettings

_MOST_BUCKETS = 10_000


_SHOWN_OF_A_KEY = len("ls-0123456789ab")
"""Characters at the beginning of a key that are not secret. Guesses at one key have these in common."""


_ONE_SITE_V6 = 64


class RateLimit:
    """Token buckets by name, with at most `burst` tokens and `per_s` new ones a second."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def __str__(self) -> str:
        return f"{self._per_s:g} requests a second, {self._burst:g} at once"

    def wait_s(self, name: str) -> float:
        """Take a token and return 0; if there is none, return the seconds until there is one."""
        now = self._clock()
        since, tokens = self._buckets.get(name, (now, self._burst))
        tokens = min(self._burst, tokens + (now - since) * self._per_s)
        if tokens < 1:
            self._buckets[name] = now, tokens
            return (1 - tokens) / self._per_s
        self._buckets.pop(name, None)  # the newest comes last
        self._buckets[name] = now, tokens - 1
        if len(self._buckets) > _MOST_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        return 0.0


class SignInLimit:
    """Limits sign-ins on the page, both by address and by the beginning of the key."""

    def __init__(self, settings: RateLimitSettings, clock: Callable[[], float] = time.monotonic) -> None:
        per_s = settings.sign_ins_per_min / 60
        self._addresses = RateLimit(per_s, settings.sign_in_burst, clock)
        self._keys = RateLimit(per_s, settings.sign_in_burst, clock)

    def wait_s(self, address: str, key: str) -> float:
        """Take a try and return 0; if there is none left, return the seconds until there is. Only a hash is kept."""
        beginning = hashlib.sha256(key[:_SHOWN_OF_A_KEY].encode()).hexdigest()
        return self._addresses.wait_s(_site(address)) or self._keys.wait_s(beginning)


def _site(address: str) -> str:
    """Return an IPv4 address unchanged; of an IPv6 address its /64 network, since one host may use all of it."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    return str(found.ipv4_mapped or ipaddress.ip_network((int(found), _ONE_SITE_V6), strict=False))


class FairShare:
    """Limits how many things of one kind each tenant may do at once in this process."""

    def __init__(self, kind: str, places: int, patience_s: float, max_bytes: int = 64 << 20) -> None:
        """
        Args:
            kind: what is limited, for the error message.
            places: how many each tenant may do at once.
            patience_s: how long a further one waits for a place.
            max_bytes: limit for all bytes of a tenant's requests, waiting ones included. A single one may exceed it.
        """
        self._kind = kind
        self._places = places
        self._patience_s = patience_s
        self._waiting = 8 * places
        self._max_bytes = max_bytes
        self._tenants: dict[str, tuple[asyncio.Semaphore, int, int]] = {}

    @asynccontextmanager
    async def place(self, tenant: str, num_bytes: int = 0) -> AsyncIterator[None]:
        """Hold a place for a request of `num_bytes`.

        Raises Busy: no place came free in time, too many requests wait already, or they hold too many bytes.
        """
        free, users, held = self._tenants.get(tenant, (asyncio.Semaphore(self._places), 0, 0))
        if users >= self._places + self._waiting or (users and held + num_bytes > self._max_bytes):
            raise self._busy()
        self._tenants[tenant] = free, users + 1, held + num_bytes
        try:
            try:
                async with asyncio.timeout(self._patience_s):
                    await free.acquire()
            except TimeoutError:
                raise self._busy() from None
            try:
                yield
            finally:
                free.release()
        finally:
            free, users, held = self._tenants[tenant]
            if users == 1:
                del self._tenants[tenant]
            else:
                self._tenants[tenant] = free, users - 1, held - num_bytes

    def _busy(self) -> Busy:
        return Busy(f"{self._places} {self._kind} of yours are going on, and as many as may wait do: ask again later")
