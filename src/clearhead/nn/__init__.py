"""Modules: the mechanisms, listed in `mechanisms`, put together by `attention` and `block`.

Shape suffixes as in `clearhead.ops`; C is the width of the residual stream.
"""

from clearhead.nn import mechanisms  # noqa: F401 (fills the registry)
from clearhead.nn.block import Block, block_of
from clearhead.nn.init import initialise
from clearhead.nn.registry import REGISTRY

__all__ = ["REGISTRY", "Block", "block_of", "initialise"]
