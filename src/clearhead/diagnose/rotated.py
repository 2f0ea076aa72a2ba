"""Kurtosis in another orthonormal basis: whether outliers are gone, or only turned out of sight.

A rotated state has the same norm; what a few channels carried in one basis, all share in most
others. So low kurtosis where Adam ran rotated shows nothing by itself, if it is high in the basis
that Adam saw (a reviewer's question about arXiv 2410.17174).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.diagnose.hidden import HiddenStatistics
from clearhead.models.inspection import batches, decoder_layers, evaluating, run_backbone
from clearhead.optim.rotations import make_rotation, random_signs, sign_key


def rotated_kurtosis(
    model: Any,
    windows: Iterable[Tensor],
    *,
    kind: str,
    seed: int,
    batch_size: int,
    share: str = "parameter",
) -> list[dict[str, Any]]:
    """Kurtosis of the hidden states Q x, Q being OrthoAdam's rotation of the embedding's columns.

    Args:
        model: any causal language model of transformers; its mode is left as it was.
        windows: int64 [T] each, text from position 0 on, all of one length.
        kind: "hadamard" or "haar".
        seed: as OrthoAdam's.
        batch_size: windows run together; it changes speed and memory, not the results.
        share: as OrthoAdam's: by "size" all matrices that read the stream have this Q too.

    Returns:
        Payloads of "measure" records: "kurtosis_rotated" with "tokens" ("first" or "rest"),
        "rotation" and "rotation_share", over all layers and with "layer"; otherwise as
        `clearhead.diagnose.measure`.

    Raises:
        ClearheadError: windows or a model that this cannot be measured on.
    """
    statistics = HiddenStatistics()
    # On the CPU it is made in float64; hidden states are float32 at most.
    table = model.get_input_embeddings().weight
    size = table.shape[-1]
    rotation = make_rotation(kind, seed=seed, size=size).to(model.device)
    signs = torch.ones(size, device=model.device)
    if share == "parameter":
        name = next(name for name, p in model.named_parameters() if p is table)
        signs = random_signs([sign_key(seed, name, -1)], size, model.device)[0]

    def hook(layer: int) -> Any:
        def observe(module: nn.Module, arguments: Any, output: Any) -> None:
            x_BTC = output[0] if isinstance(output, tuple) else output
            with torch.no_grad(), torch.autocast(x_BTC.device.type, enabled=False):
                statistics.observe(layer, rotation.apply(x_BTC.float() * signs, -1))

        return observe

    handles = [
        layer.register_forward_hook(hook(index))
        for index, layer in enumerate(decoder_layers(model))
    ]
    try:
        with evaluating(model):
            for ids_BT in batches(model, windows, batch_size):
                run_backbone(model, ids_BT)
    finally:
        for handle in handles:
            handle.remove()
    return [
        {**line, "metric": "kurtosis_rotated", "rotation": kind, "rotation_share": share}
        for line in statistics.measures()
        if line["metric"] == "kurtosis"
    ]
