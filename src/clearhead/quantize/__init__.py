"""Simulated quantisation of any of transformers' causal language models.

Only linear layers are quantised, or attention logits; embeddings, the output matrix, norms and
hidden states keep their precision, as in the papers.
"""

from clearhead.quantize.linear import left_out as left_out
from clearhead.quantize.linear import linear_layers as linear_layers
from clearhead.quantize.measure import Texts as Texts
from clearhead.quantize.measure import cost as cost
from clearhead.quantize.measure import quantized as quantized
from clearhead.quantize.schemes import Scheme as Scheme
from clearhead.quantize.schemes import every as every
from clearhead.quantize.schemes import scheme as scheme
