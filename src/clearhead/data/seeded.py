"""Random choices and permutations that are pure functions of a label, equal in every process."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")
_MASK = (1 << 64) - 1


class SeededChoices:
    """A stream of choices named by `label`; equal labels give equal streams."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._drawn = 0

    def below(self, bound: int) -> int:
        """An integer from 0 to bound − 1; its bias is below 2⁻⁴⁰ for bounds up to 2²⁴."""
        digest = hashlib.sha256(f"{self._label} {self._drawn}".encode()).digest()
        self._drawn += 1
        return int.from_bytes(digest[:8], "big") % bound

    def choice(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.below(len(options))]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """`count` of the options without replacement, in random order."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(count)]


def raw_numbers(label: str, size: int) -> np.ndarray:
    """Random numbers, uint64 [size], that are a function of `label`: raw Philox output, whose bits,
    unlike a generator's methods, NumPy guarantees across versions."""
    key = int.from_bytes(hashlib.sha256(label.encode()).digest()[:16], "little")
    return np.random.Philox(key=key).random_raw(size)


def permutation(label: str, size: int) -> np.ndarray:
    """A permutation of range(size) that is a function of `label`: the order of `raw_numbers`."""
    order = raw_numbers(label, size).argsort(kind="stable")
    return order.astype(np.uint32 if size <= 1 << 32 else np.int64)


def feistel(label: str, size: int, place: int) -> int:
    """The number at a place of a permutation of range(size) that is a function of `label`.

    A Feistel network with SplitMix64's finaliser permutes the smallest range of 4^k that holds
    `size`, again until a number is back in `size` (cycle walking, at most 4 times on average).
    """
    digest = hashlib.sha512(label.encode()).digest()
    keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(8)]
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << bits) - 1
    while True:
        left, right = place >> bits, place & low
        for key in keys:
            mixed = ((right ^ key) + 0x9E3779B97F4A7C15) & _MASK
            mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
            left, right = right, left ^ ((mixed ^ (mixed >> 31)) & low)
        place = left << bits | right
        if place < size:
            return place
