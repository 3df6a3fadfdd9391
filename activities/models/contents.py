"""Checks that a model's weights are finite numbers."""

import re

import numpy as np

from activities.models.files import Weights, tensor_bytes
from activities.sources.models import Location
from shared.errors import InvalidInput
from shared.models.merging import FLOATS, floats_of

_ROUTER = re.compile(r"\.(?:gate|router)\.(?:weight|bias|e_score_correction_bias)$")


def check_finite(weights: Weights, location: Location, *, all_of_them: bool) -> None:
    """Read all tensors, a few megabytes at a time, or those of a mixture's routers alone.

    Raises InvalidInput: one holds a number that is not finite; names it.
    """
    for name, tensor in weights.tensors.items():
        if tensor.dtype not in FLOATS or not (all_of_them or _ROUTER.search(name)):
            continue
        file = weights.file_of[name]
        for block in tensor_bytes(location, file, tensor):
            if not np.isfinite(floats_of(block, tensor.dtype, name)).all():
                raise InvalidInput(f"tensor {name} holds a number that is not finite", location.place(file))
