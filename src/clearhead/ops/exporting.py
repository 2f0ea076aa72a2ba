"""The state of torch.export, under which forms that serve any length are taken."""

import torch


def is_exporting() -> bool:
    """True under torch.export alone.

    Dynamo of torch 2.11 answers `torch.compiler.is_exporting()` with True under plain
    torch.compile, so the flag behind it is read.
    """
    return torch.compiler._is_exporting_flag
