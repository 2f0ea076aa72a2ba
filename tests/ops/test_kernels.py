"""The GPU's kernels by the compilers of several GPUs, none of which is needed for that.

What the interpreter takes (`test_shaped.py`) a compiler may not: `make kernels` runs both.
"""

import inspect
import re
import subprocess
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from clearhead.ops import differential_fused, shaped_fused

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
PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


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
TYPES = {"idq": "*i32", "idk": "*i32"}
TYPES |= dict.fromkeys(("sink", "lam", "lse", "row", "sum"), "*fp32")
LAUNCHES = {
    "A100": differential_fused.AMPERE,
    "L4": differential_fused.AMPERE,
    "H100": differential_fused.HOPPER,
    "B200": differential_fused.BLACKWELL,
    "MI300": differential_fused.AMD,
}
# Bytes that a program may be lent.
LENT = {"A100": 163, "L4": 99, "H100": 227, "B200": 227, "MI300": 64}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kernel", ["forward", "backward_keys", "backward_queries", "single_pass"])
def test_fused_differential_attention_spills_no_register(gpu, width, kernel):
    """And the documentation's table has what these compilers make of it."""
    adds = kernel == "single_pass"
    tiles = getattr(LAUNCHES[gpu][width], kernel)
    constants = {"D": width, "SPLIT": tiles.split, "CAUSAL": True, "ADDS": adds}
    constants |= {"M": tiles.rows, "N": tiles.keys}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    function = "backward_keys" if adds else kernel
    constants["IDS"] = False
    registers, spilt, shared = _build(gpu, function, constants, options)
    if width == 64:
        documents = constants | {"IDS": True}
        assert spilt == _build(gpu, function, documents, options)[1] == 0
    row = f"| {kernel} | {width} | {gpu} | {tiles.rows} × {tiles.keys}, {tiles.warps}, "
    row += f"{tiles.stages} | {registers} | {spilt} | {shared // 1024} KB |"
    print(row)
    assert row in PAGE.read_text("utf-8")


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("adds", [False, True])
def test_the_sums_before_a_backward_pass_spill_no_register(gpu, adds):
    for width in (64, 128):
        constants = {"D": width, "ADDS": adds, "M": differential_fused.ROWS}
        assert _build(gpu, "backward_rows", constants, {})[1] == 0


def _build(gpu, kernel, constants, options):
    """Registers, and bytes spilt and shared, of a kernel of differential attention in bfloat16."""
    from clearhead.ops import differential_kernels

    function = getattr(differential_kernels, kernel)
    names = list(inspect.signature(function.fn).parameters)
    constants = {name: x for name, x in (constants | {"SINK": True}).items() if name in names}

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            exact = constants.get("ADDS") and name == "dq_ptr"
            return "*fp32" if exact else TYPES.get(name.removesuffix("_ptr"), "*bf16")
        return "fp32" if name == "scale" else "i32"

    strides = [first + second for first in "qkv" for second in "bhts"]
    even = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if name.endswith("_ptr") or name in strides
    }
    signature = {name: type_of(name) for name in names}
    built, registers, spilt = resources(function, signature, constants, even, gpu, options)
    assert built.metadata.shared <= LENT[gpu] * 1024
    return registers, spilt, built.metadata.shared


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
