"""One command a figure: `python -m benchmarks.NAME` prints JSON with the hardware that it was measured on."""

import os

# Figures are compared with earlier ones, so the machine must not choose the precision.
os.environ.setdefault("LONGSHORE_DTYPE", "float32")
