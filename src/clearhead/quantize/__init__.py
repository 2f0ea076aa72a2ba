"""Simulated quantisation of any of transformers' causal language models.

Only linear layers are quantised, or attention logits; embeddings, the output matrix, norms and
hidden states keep their precision, as in the papers.
"""

from typing import TYPE_CHECKING

from clearhead.lazy import lazily

if TYPE_CHECKING:
    from clearhead.quantize.linear import left_out, linear_layers
    from clearhead.quantize.measure import Cost, Texts, cost, quantized
    from clearhead.quantize.quantizers import absmax, zeropoint
    from clearhead.quantize.schemes import Scheme, every, scheme

__all__ = [
    "Cost",
    "Scheme",
    "Texts",
    "absmax",
    "cost",
    "every",
    "left_out",
    "linear_layers",
    "quantized",
    "scheme",
    "zeropoint",
]

__getattr__ = lazily(__name__)
