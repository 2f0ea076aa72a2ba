"""Parameter groups: by weight decay, and by patterns of parameters' names."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from clearhead.errors import ClearheadError
from clearhead.optim.rotations import plain_name

Named = tuple[str, nn.Parameter]

# What is added and multiplies nothing, of two or more dimensions too: biases, learned keys and
# values of attention among them. Transformers' Trainer spares what is called a bias as well.
ADDED = ("*bias*", "*.normalizer.key")


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters of `model` into a group that decays and one that does not.

    Matrices and stacks of matrices decay: projections, and embeddings, whether or not they are tied
    to the output head. Parameters with fewer dimensions (norms, gains, lambdas), biases and learned
    keys do not. A tied parameter appears once; frozen ones and empty groups are left out.

    Returns:
        Groups as `torch.optim` takes them, each with "params" and "weight_decay".
    """
    groups = named_groups(split_named(model, ())[1], weight_decay)
    return [{**group, "params": [p for _, p in group["params"]]} for group in groups]


def named_groups(named: Sequence[Named], weight_decay: float) -> list[dict[str, Any]]:
    """`decay_groups` of the given parameters, which keep their names."""
    decaying = [(name, p) for name, p in named if p.ndim >= 2 and not matched(name, ADDED)]
    still = [(name, p) for name, p in named if p.ndim < 2 or matched(name, ADDED)]
    groups = ((decaying, weight_decay), (still, 0.0))
    return [{"params": found, "weight_decay": decay} for found, decay in groups if found]


def matched(name: str, patterns: Iterable[str]) -> bool:
    """True if one of a shell's `patterns` matches the whole name, wrappers' prefixes aside."""
    return any(fnmatchcase(plain_name(name), pattern) for pattern in patterns)


def split_named(model: nn.Module, patterns: Sequence[str]) -> tuple[list[Named], list[Named]]:
    """The trainable parameters that match one of `patterns`, and the others."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for pattern in patterns:
        if not any(matched(name, (pattern,)) for name, _ in trainable):
            example = plain_name(trainable[len(trainable) // 2][0]) if trainable else "(all frozen)"
            raise ClearheadError(
                f"the pattern {pattern!r} decides no parameter: names are like {example}"
            )
    chosen = [(name, p) for name, p in trainable if matched(name, patterns)]
    return chosen, [(name, p) for name, p in trainable if not matched(name, patterns)]


def names(group: Mapping[str, Any], number: int = 0) -> list[str]:
    """The parameters' names, or their indices in the group if they were given without names."""
    given = group.get("param_names")
    return given or [f"parameter {i} of group {number}" for i in range(len(group["params"]))]
