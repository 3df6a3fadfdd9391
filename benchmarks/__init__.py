"""One command a figure: `python -m benchmarks.NAME` prints JSON with the hardware that it was measured on."""

import os

# Figures are compared with earlier ones: what a stack is measured on shall not choose its precision.
os.environ.setdefault("LONGSHORE_DTYPE", "float32")
