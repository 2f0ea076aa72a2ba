"""The composition of repairs that wins on the most at once, from records of `together`.

The criteria were written before any record (docs/findings.md); nothing here is tuned to one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from clearhead.errors import ClearheadError
from clearhead.records.runs import Records
from clearhead.report.verdicts import threshold_of
from clearhead.reproduce.claims import evidence
from clearhead.reproduce.contrasts import Judgement, Outcome
from clearhead.reproduce.verbs import lower, number

CHOSEN_ON, CONFIRMED_ON = (0, 1, 2), (3, 4, 5)
MARGIN = 0.01  # nats of loss at the training length
LOSS = "loss"
# Repair → patterns of the arms with it and without it.
REPAIRS = {
    "maps=differential-v2": ("*maps differential-v2*", "*maps single*"),
    "normalizer=softmax1": ("*normalizer softmax1*", "*normalizer softmax ·*"),
    "blocks of sas-p": ("sas-p · *", "transformer · *"),
    "position=alibi": ("*position alibi*", "*position rope*"),
    "epilogue=gate": ("*epilogue gate*", "*epilogue none*"),
    "train.optimizer=orthoadam": ("* orthoadam", "* adamw"),
}
# All are better lower.
MEASURES = {
    LOSS: number("loss", times=1),
    "loss at 4 × the length": number("loss", times=4),
    "loss of recalled tokens at 4 × the length": number("ar_hit_loss", times=4),
    "kurtosis": number("kurtosis"),
    "queries with a first-token sink": number("first_token_argmax_share"),
    **{
        f"cost of {one}": number("added_perplexity", scheme=one)
        for one in ("w8a8-coarse", "w4-channel")
    },
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A repair judged by its main effects.

    Attributes:
        wins, losses: measures decided better and worse on the seeds that choose.
        confirmed: wins that lie on the same side on the others; None where these were not run.
        dearer: whether the loss at the training length may be more than the margin higher.
        chosen: whether other seeds chose it, so that its own wins are confirmed ones.
    """

    repair: str
    wins: tuple[str, ...]
    losses: tuple[str, ...]
    confirmed: tuple[str, ...] | None
    dearer: bool
    chosen: bool = False

    @property
    def enters(self) -> bool:
        """The criterion."""
        confirmed = self.confirmed or ()
        return len(confirmed) > len(self.losses) and LOSS not in self.losses and not self.dearer

    def in_words(self) -> str:
        confirmed = "not run" if self.confirmed is None else ", ".join(self.confirmed) or "none"
        parts = [
            f"better on {', '.join(self.wins) or 'nothing'}",
            f"worse on {', '.join(self.losses) or 'nothing'}",
            *([] if self.chosen else [f"found again: {confirmed}"]),
            *([f"loss more than {MARGIN} higher on other seeds"] if self.dearer else []),
        ]
        return f"{self.repair}: {'in' if self.enters else 'out'}; {'; '.join(parts)}"


def choose_repairs(records: Records) -> list[Choice]:
    """Every repair, in or out.

    Raises:
        ClearheadError: records without the measures of `together` under the seeds that choose.
    """
    first = {
        repair: list(_outcomes(records, sides, CHOSEN_ON)) for repair, sides in REPAIRS.items()
    }
    missing = [repair for repair, ones in first.items() if len(ones) < len(MEASURES)]
    if missing:
        raise ClearheadError(
            f"{', '.join(missing)}: not all of {len(MEASURES)} measures under seeds 0 to 2: run "
            "clearhead reproduce together"
        )
    threshold = threshold_of(one.difference for ones in first.values() for one in ones)
    return [_choice(records, repair, ones, threshold) for repair, ones in first.items()]


def judge_composition(records: Records) -> Choice | None:
    """The preset `clearhead` beside the baseline, by the same test; None where it was not run."""
    sides = ("clearhead", "transformer")
    outcomes = list(_outcomes(records, sides, CONFIRMED_ON, label="composition"))
    if not outcomes:
        return None
    threshold = threshold_of(one.difference for one in outcomes)
    wins = _named(outcomes, Judgement.HOLDS, threshold)
    losses = _named(outcomes, Judgement.DOES_NOT_HOLD, threshold)
    return Choice(
        repair="clearhead", wins=wins, losses=losses, confirmed=wins, dearer=False, chosen=True
    )


def _choice(records: Records, repair: str, outcomes: Sequence[Outcome], threshold: float) -> Choice:
    again = {one.contrast.words: one for one in _outcomes(records, REPAIRS[repair], CONFIRMED_ON)}
    sides = {name: one.arm.mean - one.than.mean for name, one in again.items()}
    wins = _named(outcomes, Judgement.HOLDS, threshold)
    return Choice(
        repair=repair,
        wins=wins,
        losses=_named(outcomes, Judgement.DOES_NOT_HOLD, threshold),
        confirmed=tuple(name for name in wins if sides.get(name, 0) < 0) if again else None,
        dearer=sides.get(LOSS, 0) > MARGIN,
    )


def _named(outcomes: Sequence[Outcome], verdict: Judgement, threshold: float) -> tuple[str, ...]:
    return tuple(one.contrast.words for one in outcomes if one.judgement(threshold) is verdict)


def _outcomes(
    records: Records, sides: tuple[str, str], seeds: Sequence[int], label: str = "together"
) -> Iterator[Outcome]:
    runs = Records(runs=tuple(run for run in records.runs if run.seed in seeds))
    numbers = evidence({"": runs})
    for words, one in MEASURES.items():
        yield from lower(words, replace(one, label=label), *sides).outcomes(numbers)
