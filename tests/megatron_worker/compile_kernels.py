"""Compiles the head's kernels for compute capability 9.0, without a device, and prints what came of each as JSON.

A process of its own, because Triton decides for good when it is imported whether it interprets.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_worker.head import triton_tiles as tiles
from megatron_worker.head.kernels import blocks_for

CAPABILITY = 90
POINTERS = {"label": "i64", "top_id": "i32"}
OF_WEIGHTS = {"hidden", "weight", "exps", "grad", "below"}
# Triton takes a 1 for a constant.
OF_THE_PROBE = dict.fromkeys(("num_rows", "num_tiles"), 1)
SHAPE = {"BLOCK_L": 64, "WIDEN": False, "EVEN_H": True}


def compiled(kernel, blocks, dtype, absent=(), **constants):
    """A kernel as `scan` launches it: aligned tensors, a hidden size that is a multiple of the block."""
    blocked = {"BLOCK_N": blocks.targets, "BLOCK_V": blocks.rows, "BLOCK_H": blocks.hidden}
    fixed = SHAPE | blocked | {"PRECISION": "ieee" if dtype == "fp32" else "tf32"} | constants
    signature, values, hints = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in absent or name in fixed:
            signature[name], values[(place,)] = "constexpr", fixed.get(name)
        elif name == "inverse_temperature":
            signature[name] = "fp32"
        elif name.startswith(("num_", "total_")) or name in ("hidden_size", "size", "first") or "stride" in name:
            signature[name] = "i32"
        else:
            signature[name] = "*" + (dtype if name in OF_WEIGHTS else POINTERS.get(name, "fp32"))
        if signature[name].startswith("*") or "stride" in name or name == "hidden_size":
            hints[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, hints)
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    return {
        "name": kernel.__name__,
        "dtype": dtype,
        "shared_bytes": made.metadata.shared,
        "spilled_bytes": spilled_bytes(made.asm["ptx"]),
        "tensor_cores": "wgmma" in made.asm["ptx"],
    }


def spilled_bytes(ptx: str) -> int:
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            str(assembler),
            "-v",
            f"-arch=sm_{CAPABILITY}a",
            str(source),
            "-o",
            str(source.with_suffix(".cubin")),
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def main() -> None:
    half, full = blocks_for(torch.bfloat16), blocks_for(torch.float32)
    made = [
        compiled(tiles.scan_tile, half, "bf16", absent=("exps", "below"), ENTROPY=False, TOP_K=0),
        compiled(tiles.scan_tile, half, "bf16", ENTROPY=True, TOP_K=20),
        compiled(tiles.logit_gradient_tile, half, "bf16", ENTROPY=True),
        compiled(tiles.scan_tile, full, "fp32", ENTROPY=True, TOP_K=20),
        compiled(tiles.logit_gradient_tile, full, "fp32", ENTROPY=True),
        compiled(tiles.scan_tile, half, "bf16", ENTROPY=False, TOP_K=0, **OF_THE_PROBE),
        compiled(tiles.logit_gradient_tile, half, "bf16", ENTROPY=False, **OF_THE_PROBE),
        compiled(tiles.scan_tile, half, "bf16", absent=("below",), ENTROPY=True, TOP_K=0, EVEN_H=False),
        compiled(tiles.rescale, half, "bf16", absent=("below",), BLOCK_N=16),
        compiled(tiles.merge_tiles, full, "fp32", BLOCK_N=32),
        compiled(tiles.rescale, half, "bf16", BLOCK_N=16),
    ]
    json.dump(made, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
