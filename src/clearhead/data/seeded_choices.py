"""Random choices that are a function of a label: the same in every Python, process and order."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


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
        """`count` different places of `options`, in a drawn order."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(count)]
