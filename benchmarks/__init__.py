"""One command a figure: `python -m benchmarks.NAME` prints JSON with the hardware that it was measured on."""
