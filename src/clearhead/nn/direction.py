"""Direction of attention: causal or bidirectional."""

from clearhead.spec import Declaration

CAUSAL = Declaration(
    axis="direction",
    name="causal",
    summary="a token sees itself and what came before",
    source="arXiv 1706.03762",
    build=lambda: True,  # whether attention is causal
)
BIDIRECTIONAL = Declaration(
    axis="direction",
    name="bidirectional",
    summary="a token sees the whole text; no generation, no cache",
    source="arXiv 1810.04805",
    build=lambda: False,
)
