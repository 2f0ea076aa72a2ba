"""Random orthogonal changes of basis, a pure function of a seed and the size of an axis.

Both are drawn on the CPU in float64 and applied in float32 (docs/optimizers.md, "The rotations"):

- `haar`: QR of a Gaussian matrix, each column of Q given the sign of R's diagonal (without which
  the law of Q depends on the factorisation's conventions).
- `hadamard`: Q = (F₁ ⊗ F₂ ⊗ …)·D for n = 2^k·m with m odd and below 64. D is a diagonal of random
  signs; each F is a Hadamard matrix of a power of two, and the first holds a Haar matrix of size
  m as a further Kronecker factor. No F is larger than 64. Any other n has two overlapping blocks of
  the largest such size b > n·31/32, one after the other: coordinates 0 … b−1, then n−b … n−1.

A parameter's own rotation is Q·S, S a diagonal of random signs hashed from the parameter's key. S
must come first: Adam commutes with signs, so those of S·Q would cancel.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from clearhead.errors import choose
from clearhead.ops.hadamard import hadamard

KINDS = ("hadamard", "haar")

# Largest dense factor: above it products cost more than the passes over memory they save.
LARGEST_FACTOR = 64

# Modules that wrap another one and put their own word into its parameters' names.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True, eq=False)
class Block:
    """(F₁ ⊗ F₂ ⊗ …)·D on `width` coordinates from `start` on; D is the identity without `signs`."""

    start: int
    width: int
    signs: torch.Tensor | None
    factors: tuple[torch.Tensor, ...]

    def apply(self, x: torch.Tensor, *, inverse: bool) -> torch.Tensor:
        shape, after = x.shape, self.width
        if self.signs is not None and not inverse:
            x = x * self.signs
        for factor in self.factors:
            width = factor.shape[0]
            after //= width
            matrix = factor.mT if inverse else factor
            if after == 1:
                x = x.reshape(-1, width) @ matrix.mT
            else:
                x = matrix @ x.reshape(-1, width, after)
        x = x.reshape(shape)  # fresh from the last product
        return x.mul_(self.signs) if self.signs is not None and inverse else x


@dataclass(frozen=True, eq=False)
class Rotation:
    """An orthogonal matrix Q: one block over the whole axis, or two that overlap."""

    blocks: tuple[Block, ...]

    def apply(self, x: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
        """Q (inverse: Qᵀ) times every vector along the last axis of float32 `x`, out of place."""
        for block in reversed(self.blocks) if inverse else self.blocks:
            start, stop = block.start, block.start + block.width
            mixed = block.apply(x[..., start:stop], inverse=inverse)
            if block.width < x.shape[-1]:
                mixed = torch.cat((x[..., :start], mixed, x[..., stop:]), -1)
            x = mixed
        return x


def haar(size: int, generator: torch.Generator) -> torch.Tensor:
    """A Haar orthogonal matrix [size, size] in float64."""
    gaussian = torch.randn(size, size, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(gaussian)
    return (q * torch.where(r.diagonal() < 0, -1.0, 1.0)).contiguous()


def _block(start: int, width: int, generator: torch.Generator, device: torch.device) -> Block:
    """A block of a width 2^k·m, with m odd and below 64."""
    twos = (width & -width).bit_length() - 1
    signs = torch.randint(0, 2, (width,), generator=generator) * 2.0 - 1.0
    odd = haar(width >> twos, generator)
    factors = []
    for power in _split(odd.shape[0], twos):
        # Sylvester's matrix of size 2^power as an orthogonal one; the first factor holds `odd`.
        sylvester = hadamard(1 << power).double() / math.sqrt(2**power)
        factors.append(torch.kron(odd, sylvester).float().to(device))
        odd = torch.ones(1, 1, dtype=torch.float64)
    return Block(start, width, signs.to(device), tuple(factors))


def _split(odd: int, twos: int, count: int = 1) -> list[int]:
    """Powers of two of as few factors as keep within the limit, the first times `odd`."""
    powers, sizes = [0] * count, [odd] + [1] * (count - 1)
    for _ in range(twos):
        smallest = sizes.index(min(sizes))
        powers[smallest] += 1
        sizes[smallest] *= 2
    return powers if max(sizes) <= LARGEST_FACTOR else _split(odd, twos, count + 1)


def make_rotation(
    kind: str, *, seed: int, size: int, device: torch.device | str = "cpu"
) -> Rotation:
    """The rotation of all axes of a `size` of at least 2, drawn on the CPU; see `KINDS`."""
    generator = torch.Generator().manual_seed(_digest(f"{seed}/{size}/") >> 1)
    device = torch.device(device)
    if choose("rotation", kind, KINDS) == "haar":
        return Rotation((Block(0, size, None, (haar(size, generator).float().to(device),)),))
    # The smallest shift that leaves a small enough quotient; of an odd part below 64 it loses none.
    twos = max((size & -size).bit_length() - 1, size.bit_length() - 6)
    width = size >> twos << twos
    starts = (0,) if width == size else (0, size - width)
    return Rotation(tuple(_block(start, width, generator, device) for start in starts))


def sign_key(seed: int, name: str, dim: int) -> int:
    """The key of the signs of one axis of one parameter, a number of 32 bits."""
    return _digest(f"{seed}/{plain_name(name)}/{dim}") >> 32


def random_signs(keys: Sequence[int], size: int, device: torch.device) -> torch.Tensor:
    """Signs ±1 [len(keys), size] in float32, a pure function of key and place on every device."""
    place_n = _mix(torch.arange(size, device=device))
    mixed_kn = _mix(torch.stack([place_n ^ key for key in keys]))
    return (1 - 2 * (mixed_kn >> 16 & 1)).float()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijective hash of numbers of 32 bits; no product in it overflows int64."""
    for _ in range(2):
        x = ((x ^ x >> 16) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ x >> 16


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of torch.compile, DDP, FSDP and checkpointing."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts.pop(0)
    return ".".join(parts)
