"""The GPU's kernels by the compilers of several GPUs, none of which is needed for that.

What the interpreter takes (`test_shaped.py`) a compiler may not: `make kernels` runs both.
"""

import inspect
import re
import subprocess
import tempfile
from itertools import product
from typing import Any

import pytest

from clearhead.ops import shaped_fused

triton = pytest.importorskip("triton", reason="CPU builds of PyTorch lack Triton: `make kernels`")

GPUS = {
    "A100": ("cuda", 80, 32),
    "L4": ("cuda", 89, 32),
    "H100": ("cuda", 90, 32),
    "B200": ("cuda", 100, 32),
    "MI300": ("hip", "gfx942", 64),
}
# What a program may have of shared memory on any of these, unasked.
SHARED = 48 * 1024


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("kernel", ["forward", "backward"])
@pytest.mark.parametrize(("x", "o"), [("fp32", "fp32"), ("fp32", "bf16"), ("fp16", "fp16")])
def test_compiles(gpu, kernel, x, o):
    from clearhead.ops import shaped_kernels

    function = getattr(shaped_kernels, kernel)
    types = {"o_BTC": o, "do_BTC": o, "gains_3BC": "fp32"}
    sizes = {"BLOCK_T": shaped_fused.BLOCK_T, "BLOCK_C": shaped_fused.BLOCK_C}
    names = inspect.signature(function.fn).parameters
    for aligned, alone in product((True, False), repeat=2):
        # Triton makes a constant of a 1.
        constants = sizes | {name: 1 for name in ("batch", "length") if alone and name in names}
        signature = {
            name: "constexpr" if name in constants else _type(name, types.get(name, x))
            for name in names
        }
        # Numbers and addresses that are multiples of 16 let several be loaded at once.
        even = {
            (at,): [["tt.divisibility", 16]]
            for at, name in enumerate(names)
            if aligned and name not in constants
        }
        source = triton.compiler.ASTSource(function, signature, constants, even)
        target = triton.backends.compiler.GPUTarget(*GPUS[gpu])
        built = triton.compile(source, target, {"num_warps": shaped_fused.WARPS})
        assert built.asm["cubin" if GPUS[gpu][0] == "cuda" else "hsaco"]
        assert built.metadata.shared <= SHARED


FOUND = re.compile(r"REG:(\d+) STACK:(\d+)")
AMD = (re.compile(r"\.vgpr_count:\s+(\d+)"), re.compile(r"\.vgpr_spill_count:\s+(\d+)"))
# Bytes that a program may be lent.
LENT = {"A100": 163, "L4": 99, "H100": 227, "B200": 227, "MI300": 64}


def _type(name: str, held: str) -> str:
    """Tensors are those whose name ends in a shape."""
    return f"*{held}" if name.rpartition("_")[2].isupper() else "i32"


def resources(
    function: Any, signature: dict, constants: dict, even: dict, gpu: str, options: dict
) -> tuple[Any, int, int]:
    """A kernel as a GPU's compiler makes it, its registers, and bytes of them that it spills."""
    source = triton.compiler.ASTSource(function, signature, constants, even)
    built = triton.compile(source, triton.backends.compiler.GPUTarget(*GPUS[gpu]), options)
    if GPUS[gpu][0] != "cuda":
        return built, *(int(x.search(built.asm["amdgcn"])[1]) for x in AMD)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return built, *map(int, FOUND.search(told).groups())
