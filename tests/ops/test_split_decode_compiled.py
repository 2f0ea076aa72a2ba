"""Kernels of a lone query by the compilers of several GPUs, beside those of `test_kernels.py`."""

import inspect

import pytest

from clearhead.ops import split_decode

pytest.importorskip("triton", reason="CPU builds of PyTorch lack Triton: `make kernels`")
from tests.ops.test_kernels import GPUS, LENT, resources

TYPES = {"mask": "*u8", "position": "*i32", "frequency": "*fp32", "sink": "*fp32", "lam": "*fp32"}
EVEN = ("part", "qb", "qh", "kb", "kh", "ks", "vb", "vh", "vs")


def _build(function, constants, types, gpu, options):
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
    return resources(function, signature, constants, even, gpu, options)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    ("maps", "rotated"), [(1, False), (2, False), (1, True)], ids=["plain", "V1", "CoCA"]
)
def test_decoding_spills_no_register(gpu, width, maps, rotated):
    """With padding."""
    from clearhead.ops import split_decode_kernels

    constants = {"D": width, "V": width, "MAPS": maps, "ROTATED": rotated, "MASKED": True}
    block, stages = split_decode.block_of(2 * width, rotated)
    constants |= {"R": 16, "N": block}
    options = {"num_warps": split_decode.WARPS, "num_stages": stages}
    types = TYPES | {"o": "*fp32", "lse": "*fp32"}
    built, _, spilt = _build(split_decode_kernels.attend, constants, types, gpu, options)
    assert built.metadata.shared <= LENT[gpu] * 1024
    assert spilt == 0


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("maps", [1, 2])
def test_joining_spills_no_register(gpu, maps):
    from clearhead.ops import split_decode_kernels

    constants = {"W": maps * 128, "MAPS": maps, "SINK": True, "C": 64}
    constants["PARTS"] = split_decode.MOST_PARTS
    types = TYPES | {"o": "*fp32", "lse": "*fp32", "out_lse": "*fp32"}
    built, _, spilt = _build(split_decode_kernels.combine, constants, types, gpu, {})
    assert spilt == 0
    assert built.metadata.shared <= LENT[gpu] * 1024
