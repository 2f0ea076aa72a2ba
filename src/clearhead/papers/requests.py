"""Selection of experiments and arms by name, changes of arms by options, and costs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError, choose
from clearhead.lab.sweep_configs import SweepConfig
from clearhead.named_models import PRESETS, SIZES
from clearhead.papers.claims import CLAIMS, PAPERS
from clearhead.papers.contrasts import Claim
from clearhead.papers.ours import PARAMETERS
from clearhead.papers.study import BEYOND, WHOLE, Experiment, Study

EXPERIMENTS = {
    one.name: one for paper in PAPERS for one in vars(paper).values() if isinstance(one, Experiment)
}
"""The papers' experiments, by name: each is a function in the file of its paper."""
ALL = ("*",)  # arms, or questions
# FLOP a second in training: measured in results/passkey.jsonl on two cores (1.97 M parameters and
# 1.5 M tokens take 300 s of one), and a tenth of an H200's dense bfloat16 peak.
SPEEDS = {"tiny": (1.2e11, "two cores"), "small": (1e14, "one GPU"), "paper": (1e14, "one GPU")}


def chosen(
    names: Sequence[str],
    scale: str,
    output: Path | None = None,
    *,
    only: Sequence[str] = (),
    questions: Sequence[str] = (),
    **changes: Any,
) -> dict[str, list[Study]]:
    """The arms of each requested experiment, in the book's order, with the experiment's folder and
    the `changes` of `changed`. Of several claims those without arms at the scale are left out."""
    if not names:
        raise ClearheadError("give a claim, a family, an experiment or all: --list prints them")
    patterns: dict[str, set[str]] = {name: set() for name in EXPERIMENTS}
    for name in names:
        if name in EXPERIMENTS:
            choose(f"scale of {name}", scale, EXPERIMENTS[name].scales)
            patterns[name].update(ALL)
            continue
        known = (name for claim in CLAIMS for name in claim.names)
        choose("experiment or claim", name, [*EXPERIMENTS, *known])
        claims = [claim for claim in CLAIMS if name in claim.names]
        there = [claim for claim in claims if arms_for(claim, scale)]
        if not there:
            scales = (one for one in SPEEDS if arms_for(claims[0], one))
            raise ClearheadError(f"{name} has no arms at {scale}, but at {', '.join(scales)}")
        for claim in there:
            patterns[claim.study] |= claim.arms
    wanted = {name: arms_of(name, scale, only or some) for name, some in patterns.items() if some}
    arms = [one.name for name in wanted for one in arms_of(name, scale)]
    of_arms = [question for some in wanted.values() for one in some for question in one.questions]
    for kind, given, there_are in (("arms", only, arms), ("questions", questions, of_arms)):
        for pattern in given:
            if not any(fnmatchcase(name, pattern) for name in there_are):
                all_ = ", ".join(dict.fromkeys(there_are)) or "none"
                raise ClearheadError(f"{pattern!r} names none of the {kind}, which are {all_}")
    folders = {name: Path("runs") / f"{name}-{scale}" for name in wanted}
    if output is not None:
        folders = {name: output / name if len(wanted) > 1 else output for name in wanted}
    changes["questions"] = questions
    return {
        name: [changed(one, output=folders[name], **changes) for one in some]
        for name, some in wanted.items()
        if some
    }


def listed(scale: str) -> Iterator[str]:
    """A line for each claim and each experiment, with its cost at the scale."""

    def bill(arms: Sequence[Study]) -> str:
        return f"at {scale} {cost(arms, scale)}" if arms else f"not at {scale}"

    for one in CLAIMS:
        costs = bill(arms_for(one, scale))
        yield f"{', '.join((one.name, *one.also))}: {one.says} [{one.study}, {costs}]"
    for each in EXPERIMENTS.values():
        where = f"{each.paper}; {', '.join(each.scales)}; {bill(arms_of(each.name, scale))}"
        yield f"{each.name}: {each.about} {where}"


def arms_for(claim: Claim, scale: str) -> list[Study]:
    """The arms that a claim compares; none if no comparison has both arms at the scale."""
    sides = ((one.ours.arm, one.theirs.arm) for one in claim.contrasts)
    both = (all(arms_of(claim.study, scale, side) for side in two) for two in sides)
    return arms_of(claim.study, scale, claim.arms) if any(both) else []


def arms_of(study: str, scale: str, patterns: Iterable[str] = ALL) -> list[Study]:
    """The arms of an experiment that patterns, ARM or ARM on TASK, name; none without the scale."""
    experiment, names = EXPERIMENTS[study], {one.partition(" on ")[0] for one in patterns}
    arms = experiment.arms(scale) if scale in experiment.scales else ()
    return [one for one in arms if any(fnmatchcase(one.name, name) for name in names)]


def changed(
    one: Study,
    *,
    tokens: int | None = None,
    questions: Sequence[str] = (),
    base: str | None = None,
    test_data: tuple[str, ...] = (),
    **changes: Any,
) -> Study:
    """An arm with a command's seeds, texts and questions; refuses `base` if weights are fresh."""
    selected = {
        name: question
        for name, question in one.questions.items()
        if any(fnmatchcase(name, pattern) for pattern in questions or ALL)
    }
    if test_data:  # where some questions read the hub's text, in place of those alone
        texts = {name: x for name, x in selected.items() if isinstance(x, SweepConfig)}
        hub = [name for name, x in texts.items() if x.data.data[0].startswith("hf:")]
        for name in hub or texts:
            text = replace(texts[name].data, data=test_data, validation=WHOLE)
            selected[name] = replace(texts[name], data=text)
    settings = {name: value for name, value in changes.items() if value} | {"questions": selected}
    if tokens is not None:
        settings |= {"tokens": tokens, "sweep_tokens": min(one.sweep_tokens, tokens)}
    if base is not None:
        if one.base is None:
            raise ClearheadError(f"--from has no effect on {one.name}, which begins anew")
        settings["base"] = base
    return one.changed(**settings)


def cost(arms: Iterable[Study], scale: str) -> str:
    """Runs, tokens and hours of training, at 6 × parameters × tokens, without evaluations."""
    runs = tokens = beyond = 0
    flops = 0.0
    sizes: dict[str, int] = {}  # by label
    for one in arms:
        sweep, trained = len(one.tries) * one.is_swept, len(one.seeds) * bool(one.tries)
        read = trained * one.train.tokens + sweep * one.sweep_tokens
        runs, tokens, beyond = runs + trained + sweep, tokens + read, beyond + BEYOND * one.is_swept
        flops += 6.0 * sizes.setdefault(one.label, parameters(one)) * read
    if not runs:
        return "no training"
    speed, place = SPEEDS[scale]
    hours = flops / speed / 3600
    time = f"{hours:.1f} h" if hours >= 1 else f"{max(1, round(60 * hours))} min"
    time = f"{hours / 24:,.0f} days" if hours > 100 else time
    count = f"{tokens / 1e6:.3g} M" if tokens < 1e9 else f"{tokens / 1e6:,.0f} M"
    count = f"{tokens / 1e9:,.0f} G" if tokens >= 1e10 else count
    more = f", sweeps may add up to {beyond} runs" if beyond else ""
    return f"{runs} runs, {count} tokens, about {time} of training on {place}{more}"


def parameters(one: Study) -> int:
    """The baseline's matrices at an arm's shape, by arithmetic: a list is of hundreds of models."""
    if one.base:
        return PARAMETERS
    shape = {**SIZES[one.size], **PRESETS[one.presets[0]], **one.set}
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    attention = 4 * width * heads * shape.get("head_dim", width // heads)
    mlp = 8 * width**2  # of either form
    if "intermediate_size" in one.set or not {"hidden_size", "mlp"} & one.set.keys():
        matrices = 3 if shape.get("mlp", "swiglu") in ("swiglu", "geglu") else 2
        mlp = matrices * width * shape.get("intermediate_size", mlp // width // matrices)
    rows = shape["vocab_size"] * (1 if shape.get("tie_word_embeddings", True) else 2)
    rows += shape["max_position_embeddings"] if shape.get("position") == "learned" else 0
    return rows * width + shape["num_hidden_layers"] * (attention + mlp)
