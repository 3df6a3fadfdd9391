"""The weight-sync transports of a host, checked before it starts a worker or sampler for a run that names one."""

import functools
import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence

from shared.child_environment import child_environment
from shared.errors import InvalidInput
from shared.jobs.weight_sync import EXPERIMENTAL, SyncBackend

_TIMEOUT_S = 120.0
_NOT_ALLOWED = "it is experimental, and its operator has not allowed it (LONGSHORE_EXPERIMENTAL_TRANSPORTS)"
_log = logging.getLogger(__name__)


def check_backend(
    backend: SyncBackend, host: str, allowed: Sequence[str] = (), problems: Mapping[str, str] | None = None
) -> None:
    """Refuse a weight sync that this host does not support. `auto`, `store` and `delta` are never refused.

    Args:
        host: what kind of host this is, for the message.
        allowed: experimental transports that its operator allows.
        problems: by transport, another reason why it does not work here.

    Raises:
        InvalidInput: it names what is possible here, and why the rest is not.
    """
    if backend in ("auto", "store", "delta"):
        return
    here = reasons_here(tuple(allowed))
    found = {name: why for name, why in here.items() if why is not None} | dict(problems or {})
    if backend in EXPERIMENTAL and backend not in allowed:
        found[backend] = _NOT_ALLOWED
    if backend not in found:
        return
    possible = ", ".join(["auto", "store", "delta", *(name for name in here if name not in found)])
    others = "".join(f"; {name} is not: {why}" for name, why in found.items() if name != backend and name in here)
    message = f"{backend} is not possible on this {host} host: {found[backend]}; possible are {possible}{others}"
    raise InvalidInput(message, "rollouts.weight_sync.backend")


@functools.cache
def reasons_here(experimental: tuple[str, ...] = ()) -> dict[str, str | None]:
    """Return every transport with the reason why it does not work here, or None. A child process finds out, once.

    `experimental`: the experimental transports to include. Empty if that process fails: a worker would fail too, with a
    clearer message.
    """
    command = [sys.executable, "-P", "-m", "megatron_worker.weight_sync", *experimental]
    try:
        done = subprocess.run(
            command, env=child_environment("worker"), capture_output=True, timeout=_TIMEOUT_S, check=True
        )
        return dict(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        _log.warning("what weights can travel by is not known: %s", error)
        return {}
