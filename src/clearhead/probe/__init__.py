"""Observation of any transformers model's attention and hidden states, by tiles, while it runs."""

from clearhead.probe.attention_call import AttentionCall as AttentionCall
from clearhead.probe.observation import measure as measure
from clearhead.probe.observation import observe as observe
from clearhead.probe.tiles import AttentionTile as AttentionTile
from clearhead.probe.tiles import ByTile as ByTile
