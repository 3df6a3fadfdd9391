"""A preflight check of this machine: a worker's or sampler's imports, and a tiny pass on each device.

    python -m megatron_worker.training.trial --role gpu|sampler

Its last line of output is a JSON list of problems, in words; the list is empty if there are none.
"""

import argparse
import json
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_worker.process.startup import slow_imports
from shared.programs import SAMPLER_MODULES, TRAINER_MODULES

if TYPE_CHECKING:
    import torch

_MODULES = {"gpu": TRAINER_MODULES, "sampler": SAMPLER_MODULES}
_SIZE = 64


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=_MODULES, required=True)
    print(json.dumps(lacks(parser.parse_args(arguments).role)))


def lacks(role: str) -> list[str]:
    try:
        with slow_imports():
            for module in _MODULES[role]:
                import_module(module)
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        return [f"its packages do not load: {error}"]
    import torch

    devices = [torch.device("cpu"), *(torch.device("cuda", number) for number in range(torch.cuda.device_count()))]
    return [told for device in devices if (told := _tried(device)) is not None] or _missing_devices()


def _tried(device: "torch.device") -> str | None:
    """Do a forward and a backward pass of small whole numbers, which are exact in every precision."""
    import torch

    given_BD = torch.arange(_SIZE * _SIZE).reshape(_SIZE, _SIZE).remainder(5).sub(2)
    weight_DE = given_BD.T.remainder(3).sub(1)
    wanted_DE = given_BD.T @ (2 * (given_BD @ weight_DE))
    try:
        weight = weight_DE.to(device, torch.float32).requires_grad_()
        (given_BD.to(device, torch.float32) @ weight).square().sum().backward()
        assert weight.grad is not None
        found_DE = weight.grad.cpu()
    except RuntimeError as error:
        return f"{device} fails at a tiny pass: {(str(error).splitlines() or [type(error).__name__])[0]}"
    return None if torch.equal(found_DE, wanted_DE.float()) else f"{device} computes a tiny pass wrongly"


def _missing_devices() -> list[str]:
    """Compare with the devices that the driver has. A torch that is built for the CPU is not meant to use them."""
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    num_there = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if hidden or torch.version.cuda is None or torch.cuda.device_count() or not num_there:
        return []
    return [f"torch finds none of its {num_there} GPUs"]


if __name__ == "__main__":
    main()
