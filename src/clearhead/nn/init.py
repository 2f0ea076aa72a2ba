"""The initialisation policy, the same for every preset unless a paper states its own.

- Matrices and embeddings: N(0, std²), std = `initializer_range` (0.02).
- Matrices that write into the residual stream (attention's and the MLP's output): N(0, std² / 2L)
  for L layers, as in GPT-2.
- Biases 0, norm gains 1.
- Parameters of a mechanism: as its paper states, in the `reset_parameters` of its own module.
"""

from torch import nn

from clearhead.spec import LayerSpec


def residual_output(layer: LayerSpec, width: int) -> nn.Linear:
    """The matrix by which a branch of `width` channels writes into the stream."""
    linear = nn.Linear(width, layer.hidden_size, bias=layer.bias)
    linear.writes_into_stream_of_depth = layer.depth  # type: ignore[assignment]
    return linear


def initialise(module: nn.Module, std: float) -> None:
    """Initialise the parameters that `module` itself owns, not those of its children.

    Goes through `torch.nn.init` by attribute, since transformers patches those functions to leave
    weights alone that a checkpoint has already filled.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        depth = getattr(module, "writes_into_stream_of_depth", None)
        nn.init.normal_(module.weight, std=std if depth is None else std / (2 * depth) ** 0.5)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    elif list(module.parameters(recurse=False)):
        module.reset_parameters()  # type: ignore[operator]
