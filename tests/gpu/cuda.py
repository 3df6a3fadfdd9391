"""What every module here wants: a CUDA device. Where there is none its tests are skipped, and the reason is printed."""

import pytest
import torch

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="there is no CUDA device; `make gpu-check` on a machine with one"
    ),
]
