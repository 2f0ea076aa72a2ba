"""The initialisation policy of every preset, unless a paper states its own.

- Matrices and embeddings: N(0, std²), std = `initializer_range` (0.02).
- Matrices that write into the residual stream (attention's and the MLP's output): N(0, std² / 2L)
  for L layers, as in GPT-2; N(0, std²) if the branch has a gain of its own or no skip connection.
- Biases 0, norm gains 1.
- Parameters of a mechanism: as its paper states, in the `reset_parameters` of its own module.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from clearhead.spec import LayerSpec

Start = Callable[[Tensor, float], None]


def normal(weight: Tensor, std: float, times: float = 1.0) -> None:
    """Fill a matrix from N(0, (std · times)²)."""
    nn.init.normal_(weight, std=std * times)


def fixed_normal(weight: Tensor, std: float, own: float) -> None:
    """Fill a matrix from N(0, own²), whatever the policy's std; with zeros for own = 0."""
    nn.init.normal_(weight, std=own) if own else nn.init.zeros_(weight)


def orthogonal(weight: Tensor, std: float) -> None:
    nn.init.orthogonal_(weight)


def identity(weight: Tensor, std: float) -> None:
    nn.init.eye_(weight)


STARTS: dict[str, Start] = {"normal": normal, "orthogonal": orthogonal, "identity": identity}


def starting(linear: nn.Linear, start: Start) -> nn.Linear:
    """Mark a matrix to be initialised by `start`."""
    linear.start = start  # type: ignore[assignment]
    return linear


def residual_output(layer: LayerSpec, width: int, *, scaled: bool) -> nn.Linear:
    """The matrix by which a branch writes into the stream; `scaled`: from a std divided by √2L."""
    linear = nn.Linear(width, layer.hidden_size, bias=layer.bias)
    times = (2 * layer.depth) ** -0.5 if scaled else 1.0
    return starting(linear, partial(normal, times=times))


def initialise(module: nn.Module, std: float) -> None:
    """Initialise what `module` itself owns, not what its children do.

    By attributes of `torch.nn.init`: transformers patches these to spare weights of a checkpoint.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        getattr(module, "start", normal)(module.weight, std)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        module.reset_parameters()  # type: ignore[operator]
