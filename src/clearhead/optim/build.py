"""Optimizers built from a config, and their parameter groups; a new optimizer is added here."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from clearhead.errors import ClearheadError, choose
from clearhead.optim.orthoadam import FUSED_DEVICES, OrthoAdam
from clearhead.optim.rotations import plain_name
from clearhead.settings.recipe import Course

Named = tuple[str, nn.Parameter]

# Parameters that are added, not multiplied, whatever their dimensions: biases, learned keys and
# values of attention. Like transformers' Trainer, weight decay spares anything named bias.
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
    decays = {name for name, p in named if p.ndim >= 2 and not matched(name, ADDED)}
    decaying = [(name, p) for name, p in named if name in decays]
    still = [(name, p) for name, p in named if name not in decays]
    groups = ((decaying, weight_decay), (still, 0.0))
    return [{"params": weights, "weight_decay": decay} for weights, decay in groups if weights]


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
    chosen = {name for name, _ in trainable if matched(name, patterns)}
    others = [(name, p) for name, p in trainable if name not in chosen]
    return [(name, p) for name, p in trainable if name in chosen], others


def build_optimizer(model: nn.Module, config: Course) -> torch.optim.Optimizer:
    """The optimizer that `config` names, over the trainable parameters of `model`; a ClearheadError
    for a pattern that matches nothing, or where Muon or OrthoAdam has no matrix to step."""
    return OPTIMIZERS[choose("optimizer", config.optimizer, OPTIMIZERS)](model, config)


def _adamw_of(groups: list[dict[str, Any]], config: Course) -> torch.optim.Optimizer:
    first = groups[0]["params"][0]
    device = (first[1] if isinstance(first, tuple) else first).device
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        fused=True if device.type in FUSED_DEVICES else None,
    )


def _orthoadam(model: nn.Module, config: Course) -> torch.optim.Optimizer:
    plain, rotated = split_named(model, config.adamw_patterns)
    unrotated = [{**one, "rotation": "none"} for one in named_groups(plain, config.weight_decay)]
    return OrthoAdam(
        [*named_groups(rotated, config.weight_decay), *unrotated],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        rotation=config.rotation or "hadamard",
        share=config.rotation_share or "parameter",
        seed=config.seed,
    )


def _muon(model: nn.Module, config: Course) -> torch.optim.Optimizer:
    """Muon, with AdamW's scale of updates, for the hidden matrices that no pattern of
    `adamw_patterns` names; AdamW for all else, embeddings and the output head too."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()  # a Hugging Face model's
    if head is not None:
        tables.append(head.weight)
    plain, others = split_named(model, config.adamw_patterns)
    hidden = {p for _, p in others if p.ndim == 2} - {*tables}
    own = [(name, p) for name, p in others if p in hidden]
    if not own:
        raise ClearheadError(
            "no matrix is left for muon: it steps hidden matrices, AdamW the rest; "
            "give fewer adamw_patterns, or choose adamw"
        )
    plain += [(name, p) for name, p in others if p not in hidden]
    muon = torch.optim.Muon(
        named_groups(own, config.weight_decay),
        lr=config.learning_rate,
        momentum=0.95 if config.momentum is None else config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    if not plain:
        return CombinedOptimizer(muon)
    return CombinedOptimizer(muon, _adamw_of(named_groups(plain, config.weight_decay), config))


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one; its state and groups are theirs, in order."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss

    def _share(self) -> None:
        """Let the parts work on this one's state and groups, so that there is only one of each."""
        first = 0
        for part in self._parts:
            last = first + len(part.param_groups)
            part.state, part.param_groups = self.state, self.param_groups[first:last]
            first = last


OPTIMIZERS: dict[str, Callable[[nn.Module, Course], torch.optim.Optimizer]] = {
    "adamw": lambda model, config: _adamw_of(decay_groups(model, config.weight_decay), config),
    "orthoadam": _orthoadam,
    "sgd": lambda model, config: torch.optim.SGD(
        decay_groups(model, config.weight_decay),
        lr=config.learning_rate,
        momentum=0.9 if config.momentum is None else config.momentum,
    ),
    "rmsprop": lambda model, config: torch.optim.RMSprop(
        decay_groups(model, config.weight_decay),
        lr=config.learning_rate,
        alpha=config.betas[1],
        eps=config.epsilon,
        momentum=config.momentum or 0.0,
    ),
    "adafactor": lambda model, config: torch.optim.Adafactor(
        decay_groups(model, config.weight_decay), lr=config.learning_rate
    ),
    "muon": _muon,
}
"""Optimizers by name: functions of the model and its settings."""
