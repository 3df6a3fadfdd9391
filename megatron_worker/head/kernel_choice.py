"""The choice between kernels and torch: on CUDA kernels; if they cannot be used, that is a warning or an error.

The policy holds for a whole process, like torch's switches: `auto` takes kernels on CUDA and warns once of each reason
not to; `strict` raises an error without them, on the CPU too, where only Triton's interpreter runs them
(TRITON_INTERPRET=1, for tests); `torch` never takes one.
"""

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import get_args

import torch
from torch import Tensor

from shared.errors import InvalidInput
from shared.settings import KernelPolicy

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LEAST_CAPABILITY = (8, 0)

_policy: KernelPolicy = "auto"


def set_policy(policy: KernelPolicy) -> None:
    global _policy
    assert policy in get_args(KernelPolicy), policy
    _policy = policy


@contextmanager
def policy(policy: KernelPolicy) -> Iterator[None]:
    """Set another policy within the block."""
    before = _policy
    set_policy(policy)
    try:
        yield
    finally:
        set_policy(before)


def use_kernel(name: str, tensor: Tensor, probe: Callable[[Tensor], None]) -> bool:
    """Return True if the kernel called `name` is to be used on tensors of this one's device and dtype.

    Args:
        probe: runs the kernel on a small tensor of that device and dtype, and may raise anything. Called once.

    Raises InvalidInput under `strict` if the kernel cannot be used.
    """
    if _policy == "torch" or (_policy == "auto" and not tensor.is_cuda):
        return False
    reason = _reason_against(tensor.device, tensor.dtype, probe)
    if reason is None:
        return True
    if _policy == "strict":
        raise InvalidInput(f"the kernel {name!r} cannot be used, and kernels are strict: {reason}", "LONGSHORE_KERNELS")
    _warn(f"the kernel {name!r} is not used, torch does its work: {reason}")
    return False


@functools.cache
def _reason_against(device: torch.device, dtype: torch.dtype, probe: Callable[[Tensor], None]) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and not _is_interpreted():
        return f"it needs CUDA, and the tensors are on {device.type}"
    if dtype not in _DTYPES:
        return f"it knows no {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _LEAST_CAPABILITY:
        return f"it needs compute capability {_LEAST_CAPABILITY}, and {torch.cuda.get_device_name(device)} has {found}"
    try:
        probe(torch.ones(1, 1, device=device, dtype=dtype))
    except Exception as error:  # a compiler, a driver or a chip may refuse in many ways, and torch can do the work
        return f"{type(error).__name__}: {error}"
    return None


def _is_interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)
