"""The simplified blocks at a tiny size."""

import torch
from torch import Tensor, nn

from clearhead import ClearheadConfig, preset

from . import space

SHAPE = space.SHAPE | {"head_dim": 4}
BLOCKS = ["parallel", "skipless", "sas", "sas-p", "sas-p-nonorm"]
# Every attention that C is defined for, at a kind of scores and positions each.
COMBINATIONS = [
    {"normalizer": normalizer, "maps": maps, "num_key_value_heads": groups}
    for normalizer in ("softmax", "softmax1", "sink")
    for maps in ("single", "differential", "differential-v2")
    for groups in (4, 2)
]


def make_config(name: str, **keys: object) -> ClearheadConfig:
    if keys.get("maps") == "differential":
        keys["head_norm"] = "none"
    return preset(name, **SHAPE | keys)


def stirred(model: nn.Module) -> nn.Module:
    """Every number that starts as a constant, moved away from it."""
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    return model.eval()


def random_ids(batch: int = 2, length: int = 11) -> Tensor:
    return torch.randint(0, 31, (batch, length))
