"""Kernels of a lone query by the compilers of several GPUs, none of which is needed for that."""

import inspect
import re
import subprocess
import tempfile
from typing import Any

import pytest

from clearhead.ops import split_decode

triton = pytest.importorskip("triton", reason="CPU builds of PyTorch lack Triton: `make kernels`")

GPUS = {
    "A100": ("cuda", 80, 32),
    "L4": ("cuda", 89, 32),
    "H100": ("cuda", 90, 32),
    "B200": ("cuda", 100, 32),
    "MI300": ("hip", "gfx942", 64),
}
SPILT = re.compile(r"REG:\d+ STACK:(\d+)")
SPILT_BY_AMD = re.compile(r"\.vgpr_spill_count:\s+(\d+)")
# Bytes that a program may be lent.
LENT = {"A100": 163, "L4": 99, "H100": 227, "B200": 227, "MI300": 64}


TYPES = {"mask": "*u8", "position": "*i32", "frequency": "*fp32", "sink": "*fp32", "lam": "*fp32"}
EVEN = ("part", "qb", "qh", "kb", "kh", "ks", "vb", "vh", "vs")


def _build(function: Any, constants: dict, types: dict, gpu: str, options: dict) -> tuple[int, int]:
    """A kernel's shared bytes as a GPU's compiler makes it, and registers that it spills, bytes."""
    names = list(inspect.signature(function.fn).parameters)

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            return types.get(name.removesuffix("_ptr"), "*bf16")
        return "fp32" if name == "scale" else "i32"

    even = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if name.endswith("_ptr") or name in EVEN
    }
    signature = {name: type_of(name) for name in names}
    source = triton.compiler.ASTSource(function, signature, constants, even)
    built = triton.compile(source, triton.backends.compiler.GPUTarget(*GPUS[gpu]), options)
    shared = built.metadata.shared
    if GPUS[gpu][0] != "cuda":
        return shared, int(SPILT_BY_AMD.search(built.asm["amdgcn"])[1])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return shared, int(SPILT.search(told)[1])


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("maps", "rotated"), [(1, False), (2, False), (1, True)])
def test_decoding_spills_no_register(gpu, width, maps, rotated):
    """With padding."""
    from clearhead.ops import split_decode_kernels

    constants = {"D": width, "V": width, "MAPS": maps, "ROTATED": rotated, "MASKED": True}
    block, stages = split_decode.block_of(2 * width, rotated)
    constants |= {"R": 16, "N": block}
    options = {"num_warps": split_decode.WARPS, "num_stages": stages}
    types = TYPES | {"o": "*fp32", "lse": "*fp32"}
    shared, spilt = _build(split_decode_kernels.attend, constants, types, gpu, options)
    assert (shared <= LENT[gpu] * 1024, spilt) == (True, 0)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("maps", [1, 2])
def test_joining_spills_no_register(gpu, maps):
    from clearhead.ops import split_decode_kernels

    constants = {"W": maps * 128, "MAPS": maps, "SINK": True, "C": 64}
    constants["PARTS"] = split_decode.MOST_PARTS
    types = TYPES | {"o": "*fp32", "lse": "*fp32", "out_lse": "*fp32"}
    shared, spilt = _build(split_decode_kernels.combine, constants, types, gpu, {})
    assert (shared <= LENT[gpu] * 1024, spilt) == (True, 0)
