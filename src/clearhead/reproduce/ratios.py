"""Gains of trained values and projections: arXiv 2311.01906, figures 4 and 22.

W = α I + β ΔW in every layer, from β = 0.2 as in the authors' script of figure 4. The start of
figure 22 is not published: the same is taken.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from clearhead.experiments.sweep_configs import DiagnoseConfig
from clearhead.reproduce.blocks import PRE_LN, SAS, VALUES, tables
from clearhead.reproduce.study import TRAINED, Study

MATRICES: dict[str, Any] = {**VALUES, "value_gain": 0.2}


def ratios(scale: str) -> Iterator[Study]:
    """Blocks without and with the skip around attention, trained and at their start.

    `clearhead diagnose` measures β/α, which is of the weights alone: a little text will do.
    """
    layers, table = next(iter(tables(scale).items()))  # the least deep
    asked = DiagnoseConfig(models=(TRAINED,), length=128, windows=4, extrapolate=1)
    for label, trained in (("ratios", True), ("ratios at the start", False)):
        pre_ln, sas = (PRE_LN[layers], SAS[layers]) if trained else ((), ())
        one = replace(table, label=label, questions={"ratios": asked})
        yield one.arm("transformer", *pre_ln, **MATRICES)
        yield one.arm("sas", *sas, **MATRICES)  # the intervention
