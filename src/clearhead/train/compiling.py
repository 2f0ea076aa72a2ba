"""torch.compile, one decoder layer at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import nn
from torch._dynamo import config as dynamo
from torch._dynamo.exc import TorchDynamoException

from clearhead.errors import ClearheadError, first_line
from clearhead.models.inspection import decoder_layers

# Models of one process share the code of their layers, and PyTorch leaves what comes after its
# limit of eight graphs of one code eager, with a warning in its log.
GRAPHS = 128


@contextmanager
def compiled(model: nn.Module, mode: Literal["none", "blocks"]) -> Iterator[None]:
    """Run the body with the decoder layers of `model` compiled in place, which share one graph, and
    modules that set `compile_like_a_layer`, as clearhead's loss does."""
    if mode == "none":
        yield
        return
    others = [one for one in model.modules() if getattr(one, "compile_like_a_layer", False)]
    layers = [*decoder_layers(model), *others]
    for layer in layers:
        layer.compile()
    try:
        with dynamo.patch(recompile_limit=max(GRAPHS, dynamo.recompile_limit)):
            yield
    except TorchDynamoException as error:
        raise ClearheadError(
            f"torch.compile does not work here ({first_line(error)}): install a C++ compiler such "
            "as g++ with Python's headers, or train with compile none"
        ) from error
    finally:
        for layer in layers:
            layer._compiled_call_impl = None
