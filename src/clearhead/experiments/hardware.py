"""GPUs: data sheets' dense bf16 rate, memory and bandwidth, and a price to be changed."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GPU:
    """A GPU.

    Attributes:
        flops: a second, dense bf16 with float32 sums.
        bandwidth: bytes a second.
        memory: bytes.
        price: US dollars an hour, about what clouds asked for one on demand in 2026.
    """

    flops: float
    bandwidth: float
    memory: float
    price: float


def _gpu(teraflops: float, terabytes: float, gigabytes: float, price: float) -> GPU:
    return GPU(
        flops=teraflops * 1e12, bandwidth=terabytes * 1e12, memory=gigabytes * 1e9, price=price
    )


GPUS = {
    "rtx4090": _gpu(165, 1.008, 24, 0.5),
    "l40s": _gpu(362, 0.864, 48, 1.2),
    "a100": _gpu(312, 2.039, 80, 1.8),
    "h100": _gpu(989, 3.35, 80, 3.0),
    "h200": _gpu(989, 4.8, 141, 3.8),
    "b200": _gpu(2250, 8.0, 180, 6.0),
    "mi300x": _gpu(1307, 5.3, 192, 3.0),
}
