"""Parameter groups: by weight decay, and by patterns of parameters' names."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
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
    to the output head (tied, they *are* the head's matrix; untied, a rule to tell them apart would
    need each architecture's names). Parameters with fewer dimensions (norms, gains, lambdas) and
    those in `ADDED` do not. A tied parameter appears once; frozen ones and empty groups are left
    out.

    Returns:
        Groups as `torch.optim` takes them, each with "params" and "weight_decay".
    """
    groups = named_groups(_trainable(model), weight_decay)
    return [{**group, "params": [p for _, p in group["params"]]} for group in groups]


def pattern_groups(
    model: nn.Module, rules: Sequence[tuple[str, Mapping[str, Any]]], weight_decay: float
) -> list[dict[str, Any]]:
    """Group the trainable parameters by the first rule whose pattern matches the name.

    Within each rule matrices decay and the rest does not, as in `decay_groups`. For example, plain
    AdamW for the embeddings in `OrthoAdam`:
    `pattern_groups(model, [("*embed*", {"rotation": "none"})], 0.1)`.

    Args:
        rules: (pattern, options) pairs. A pattern is a shell's, `*`, `?` and `[…]`, matched against
            the whole name without the prefixes of wrappers (`module.`, `_orig_mod.`, …).
            Parameters that match none keep the optimizer's own options.

    Returns:
        Groups of named parameters as `torch.optim` takes them.

    Raises:
        ClearheadError: for a pattern without effect.
    """
    trainable = _trainable(model)
    chosen: list[list[Named]] = [[] for _ in (*rules, None)]
    for name, parameter in trainable:
        matches = (i for i, (pattern, _) in enumerate(rules) if matched(name, (pattern,)))
        chosen[next(matches, -1)].append((name, parameter))
    for (pattern, _), named in zip(rules, chosen, strict=False):
        if not named:
            raise _idle(pattern, trainable)
    return [
        {**options, **group}
        for (_, options), named in zip((*rules, ("*", {})), chosen, strict=True)
        for group in named_groups(named, weight_decay)
    ]


def named_groups(named: Sequence[Named], weight_decay: float) -> list[dict[str, Any]]:
    """`decay_groups` of the given parameters, which keep their names."""
    kinds: dict[bool, list[Named]] = {True: [], False: []}
    for name, parameter in named:
        kinds[parameter.ndim >= 2 and not matched(name, ADDED)].append((name, parameter))
    groups = [
        {"params": kinds[True], "weight_decay": weight_decay},
        {"params": kinds[False], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def matched(name: str, patterns: Iterable[str]) -> bool:
    """True if one of `patterns` matches the whole name, wrappers' prefixes aside."""
    return any(map(partial(fnmatchcase, plain_name(name)), patterns))


def split_named(model: nn.Module, patterns: Sequence[str]) -> tuple[list[Named], list[Named]]:
    """The trainable parameters that match one of `patterns`, and the others.

    Raises:
        ClearheadError: for a pattern that matches nothing.
    """
    trainable = _trainable(model)
    for pattern in patterns:
        if not any(matched(name, (pattern,)) for name, _ in trainable):
            raise _idle(pattern, trainable)
    chosen = [(name, p) for name, p in trainable if matched(name, patterns)]
    others = [(name, p) for name, p in trainable if not matched(name, patterns)]
    return chosen, others


def _trainable(model: nn.Module) -> list[Named]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _idle(pattern: str, named: Sequence[Named]) -> ClearheadError:
    return ClearheadError(
        f"the pattern {pattern!r} decides no parameter: names are like "
        f"{plain_name(named[len(named) // 2][0]) if named else 'none (all are frozen)'}, and an "
        "earlier pattern wins"
    )


def names(group: Mapping[str, Any], number: int = 0) -> list[str]:
    """The parameters' names, or their indices in the group if they were given without names."""
    given = group.get("param_names")
    return given or [f"parameter {i} of group {number}" for i in range(len(group["params"]))]
