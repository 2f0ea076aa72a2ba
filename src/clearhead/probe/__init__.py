"""Observation of any Transformers model: its attention and hidden states, while it runs.

Probes ride on transformers' AttentionInterface and on forward hooks, so a model's outputs stay the
same bit for bit. They hold a tile of attention weights at a time, never a T × T map.
"""

from typing import TYPE_CHECKING

from clearhead.lazy import lazily

if TYPE_CHECKING:
    from clearhead.probe.attention_call import AttentionCall
    from clearhead.probe.observation import measure, observe
    from clearhead.probe.tiles import AttentionTile, ByTile

__all__ = ["AttentionCall", "AttentionTile", "ByTile", "measure", "observe"]

__getattr__ = lazily(__name__)
