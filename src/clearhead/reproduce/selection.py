"""The experiments that given names ask for: those of claims, of families, or by their own names."""

from collections.abc import Sequence

from clearhead.errors import ClearheadError, choose
from clearhead.reproduce import EXPERIMENTS, Experiment
from clearhead.reproduce.claims import claims

ALL = "*"
EVERYTHING = "all"


def choose_studies(names: Sequence[str], scale: str) -> list[tuple[Experiment, tuple[str, ...]]]:
    """Each experiment asked for, once, with the patterns of its arms to run; none is all of them.

    Raises:
        ClearheadError: no name, an unknown one, a claim without an experiment, or a scale that an
            experiment asked for by name does not have.
    """
    if not names:
        raise ClearheadError("give a claim, a family, an experiment or all: --list prints them")
    wanted: dict[str, set[str]] = {}
    families = {claim.family for claim in claims()}
    known = [*EXPERIMENTS, *sorted(families), *(claim.name for claim in claims()), EVERYTHING]
    for name in names:
        choose("experiment or claim", name, known)
        if name in EXPERIMENTS:
            choose(f"scale of {name}", scale, EXPERIMENTS[name].scales)
            wanted[name] = {ALL}
            continue
        chosen = [claim for claim in claims() if name in (claim.name, claim.family, EVERYTHING)]
        if name == EVERYTHING:
            chosen = list(claims())
        for claim in chosen:
            if claim.study:
                arms = wanted.setdefault(claim.study, set())
                arms |= {one for each in claim.contrasts for one in (*each.arm, *each.than)} or {
                    ALL
                }
            elif claim.name == name:
                raise ClearheadError(f"{name} has no experiment: {claim.why}")
    if not wanted:
        raise ClearheadError(f"no claim of {', '.join(names)} has an experiment")
    return [
        (one, () if ALL in wanted[one.name] else tuple(sorted(wanted[one.name])))
        for one in EXPERIMENTS.values()
        if one.name in wanted and scale in one.scales
    ]
