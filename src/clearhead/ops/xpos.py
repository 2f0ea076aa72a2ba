"""xPos: rotary positions whose scores also fade with distance, by a scale in the rotary table."""

import torch
from torch import Tensor

# Tokens after which a wave's score has faded by one more factor ζ.
FADING = 512


def xpos_tables(
    queries_BT: Tensor, keys_BS: Tensor, frequency: Tensor, centre: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Rotary tables of queries and keys, float32, times ζ_j^±((position − centre) / 512).

    ζ_j = (2j + 0.4 d) / (1.4 d) (arXiv 2212.10554), so that the score of pair j has the factor
    ζ_j^((m−n)/512), whatever the centre. A fixed centre, not one of the sequence, lets keys stay
    in a cache; centred on the middle of the positions in use, the factors stay smallest. Up to
    36,000 tokens from it they fit in bfloat16 and float32 (float16: 4,500).
    """
    width = 2 * frequency.shape[-1]
    pair = torch.arange(0, width, 2, device=frequency.device, dtype=torch.float32)
    zeta = (pair + 0.4 * width) / (1.4 * width)

    def table(positions: Tensor, sign: int) -> tuple[Tensor, Tensor]:
        at = positions[:, None, :, None].float()
        angle, scale = at * frequency, zeta ** (sign * (at - centre) / FADING)
        return angle.cos() * scale, angle.sin() * scale

    return table(queries_BT, 1), table(keys_BS, -1)
