"""Errors for users: one line that says what was wrong, what was found, what would work."""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any

# Option and its word, "" for any → the module that it needs, and the extra that brings it.
_NEEDS = {
    ("track", "tensorboard"): ("torch.utils.tensorboard", "tensorboard"),
    ("track", "wandb"): ("wandb", "wandb"),
    ("lora", ""): ("peft", "peft"),
    ("deploy", ""): ("torchao", "torchao"),
    ("save", ""): ("compressed_tensors", "compressed-tensors"),
    ("tasks", "lm_eval"): ("lm_eval", "lm-eval"),
}


class ClearheadError(Exception):
    """A request that cannot be met; the command line prints its one-line message, no traceback.
    Not a ValueError, which parsers catch."""

    printed_elsewhere = False  # by another process of the same run


NOT_FINITE = "not finite"
"""In place of a measured number that is NaN or too large."""


class NotFinite(ClearheadError):  # noqa: N818 (a result of a measurement, too)
    """Logits that contain NaN or +∞, from which no answer can be taken."""


class Stopped(Exception):  # noqa: N818 (a request, not a fault)
    """A signal stopped the work, which is saved. `code` is the exit status of the process."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped and saved: the same command goes on from here")
        self.code = 128 + number


def choose(kind: str, word: str, options: Iterable[str]) -> str:
    """Return `word` if it is one of `options`; else a ClearheadError names the near misses, or
    every option where none is near."""
    names = sorted({*options})
    if word in names:
        return word
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(names)}"
    raise ClearheadError(f"unknown {kind} {word!r}: {hint}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message that has any words; "" where none has."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def require(module: str, extra: str) -> ModuleType:
    """Import an optional `module`; a ClearheadError names the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ClearheadError(
            f"{module} is not installed; it comes with an extra: pip install 'clearhead[{extra}]'"
        ) from error


def require_extras(settings: Mapping[str, Any]) -> None:
    """Import every module that settings need, those of nested settings too, before any work."""
    for key, value in settings.items():
        inner = vars(value) if is_dataclass(value) else value
        if isinstance(inner, Mapping):  # its keys are options too, such as those to vary
            require_extras(inner)
            continue
        option = str(key).removeprefix("train.")
        for word in filter(None, inner if isinstance(inner, tuple) else (inner,)):
            for part in str(word).split(","):
                if need := _NEEDS.get((option, part)) or _NEEDS.get((option, "")):
                    require(*need)
