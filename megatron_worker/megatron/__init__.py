"""The Megatron engine: megatron-core's GPTModel behind the Engine interface, on CPU with gloo and on CUDA with NCCL."""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Warnings at import, and at every layer of every model, about packages that are left out on purpose.
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed.*")
warnings.filterwarnings("ignore", message="full scope is deprecated.*")
warnings.filterwarnings("ignore", message="`torch.distributed..*_tensor` is deprecated.*", category=FutureWarning)
logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)


@contextmanager
def _without_wandb_and_compiler() -> Iterator[None]:
    """Keep megatron-core's import from loading what the engine never calls, which halves a worker's time to start.

    Its inference engine imports wandb, if that is installed. Its fused activations, which our layer specs do not use,
    are decorated with torch.compile, which loads torch's inductor.
    """
    compiler, hidden = torch.compile, "wandb" not in sys.modules
    torch.compile = _not_compiled  # type: ignore[assignment]
    if hidden:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiler
        if hidden:
            del sys.modules["wandb"]


def _not_compiled(function: Callable[..., Any] | None = None, **_: object) -> Callable[..., Any]:
    return function or (lambda decorated: decorated)


with _without_wandb_and_compiler():
    import megatron.core.tensor_parallel.layers  # noqa: F401
