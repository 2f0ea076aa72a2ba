"""Sentences of a page: plain text built from the records, not yet escaped."""

from collections.abc import Callable, Iterator, Sequence

from clearhead.records.runs import Records
from clearhead.report import style
from clearhead.report.page import Block, Tag
from clearhead.report.pivots import by_seed, entry
from clearhead.report.quantities import Quantity, no_seed_varies, seeds_in_words
from clearhead.report.statistics import LEVEL, Difference, Verdict, compare, summarize
from clearhead.report.verdicts import holds

Maker = Callable[[Records], Block | None]
MANY = 6  # arms: beyond, a sentence names the reference and the ends alone


def enumerate_words(words: Sequence[str]) -> str:
    """a, b and c"""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" and {words[-1]}"


def record_name(label: str) -> str:
    """Name of the records under one label on the page."""
    return label[:1].upper() + label[1:] or "This run"


def title_of(records: Records) -> str:
    """The models by name, as a page's title."""
    arms = records.arms()
    if len(arms) <= MANY:
        return enumerate_words(arms) if arms else "No records"
    return f"{arms[0]} and {len(arms) - 1} others"


def text_in_words(records: Records) -> str:
    """on books.jsonl (held-out part): the text that was read; "" where records do not say."""
    texts: dict[str, None] = {}
    for run in records.runs:
        data, settings = (run.header.get(name) or {} for name in ("data", "evaluation"))
        specs = [str(one["spec"]) for one in data.get("sources") or () if isinstance(one, dict)]
        part = "" if settings.get("split") == "all" else " (held-out part)"
        texts |= {", ".join(specs) + part: None} if specs else {}
    return f" on {'; '.join(texts)}" if texts else ""


def sets(records: Records) -> list[tuple[Tag, Records]]:
    """The records of each label under its mark."""
    return [(_tag(one, records.labelled(one)), records.labelled(one)) for one in records.labels()]


def each(records: Records, *makers: Maker) -> Iterator[Block]:
    """The tables and figures of each set of records, under its mark."""
    for tag, labelled in sets(records):
        blocks = [block for make in makers if (block := make(labelled)) is not None]
        yield from [tag, *blocks] if blocks else []


def _tag(label: str, records: Records) -> Tag:
    amount = max((run.budget or 0.0 for run in records.runs), default=0.0)
    facts = [f"{style.count(amount)} tokens a model"] if amount else []
    if not (records.given or no_seed_varies(records)):
        facts.append(seeds_in_words(max(len(records.of(arm)) for arm in records.arms())))
    return Tag(label=label, name=record_name(label), facts=" · ".join(facts))


def answer(
    records: Records,
    what: str,
    quantity: Quantity,
    *,
    words: tuple[str, str] | None = None,
    threshold: float = LEVEL,
    alone: str = "",
    errors: bool = False,
    more: str = "",
) -> str:
    """`WHAT: transformer 14.0; differential 13.1, 5.8 % better [3.7, 7.9].`; "" without a number.

    Means over seeds, by label where there are several.

    Args:
        words: adjectives of a number below the reference's and of one above it, which stand with
            the difference in per cent of the reference's number; None: the numbers alone.
        threshold: the largest p of a difference that holds among all that are shown.
        alone: the sentence of one model, whose name is the page's title: "{} of all queries".
        errors: numbers stand as in tables, with their spread or interval.
        more: the end of the sentence.
    """
    parts, alone = [], alone * (len(records.arms()) == 1)
    write = quantity.write or style.number
    for label in records.labels():
        labelled = records.labelled(label)
        every = {arm: quantity.found(labelled, arm) for arm in labelled.arms()}
        values = {arm: by_seed(ones) for arm, ones in every.items() if ones}
        means = {arm: sum(ones) / len(ones) for arm, ones in values.items()}
        reference = next(iter(labelled.arms()), "")
        ends = [pick(means, key=means.__getitem__) for pick in (min, max) if means]
        named = [arm for arm in means if len(means) <= MANY or arm in (reference, *ends)]
        sentences = []
        for arm in named:
            text = write(means[arm])
            if errors:
                text = entry(every[arm], {}, reference="", write=write).text
            if alone:
                return f"{alone.format(text)}{more}."
            if words and arm != reference and means.get(reference):
                difference = compare(values[arm], values[reference])
                assert difference is not None
                text += f", {_change(difference, means[reference], words, threshold)}"
            sentences.append(f"{arm} {text}")
        sentences += [f"{len(means) - len(named)} more between them"] * (len(means) > len(named))
        where = f"{record_name(label)}: " if len(records.labels()) > 1 else ""
        parts += [where + "; ".join(sentences)] if sentences else []
    return f"{what}: {'. '.join(parts)}{more}." if parts else ""


def _change(difference: Difference, base: float, words: tuple[str, str], threshold: float) -> str:
    """A difference in per cent of the reference's number, with its interval or why it has none."""
    share = difference.mean / base
    change = f"{style.percent(abs(share))} {words[share > 0]}" if share else "alike"
    if difference.interval is None:
        return f"{change} ({difference.verdict})"
    if not holds(difference, threshold):
        least = style.percent((difference.decidable or 0.0) / base)
        why = "undecided" if difference.verdict is Verdict.UNDECIDED else "alone"
        return f"{change} ({why}, ±{least})"
    low, high = sorted(100 * abs(end) / base for end in difference.interval)
    return f"{change} {style.interval(low, high)}"


def lead(records: Records, threshold: float) -> list[str]:
    """Perplexity and training speed of each model beside the reference's, with its interval."""
    if not records.runs:
        return ["There are no records yet."]

    first = records.labelled(records.labels()[0]).on_one_device()
    sentences = (
        answer(
            records,
            "Validation perplexity",
            Quantity("", metric="trained perplexity"),
            words=("better", "worse"),
            threshold=threshold,
        ),
        answer(
            first,
            "Training speed in tokens/s",
            Quantity("", metric="tokens_per_second", write=style.count),
            words=("slower", "faster"),
            threshold=threshold,
        ),
    )
    return [one for one in sentences if one]


def only_evaluated(records: Records) -> bool:
    """True if no run was trained in these records: `clearhead eval` takes models from anywhere."""
    return not any(
        run.steps or any("task" not in one.dimensions for one in run.measures.values())
        for run in records.runs
    )


def chance_floor(records: Records) -> float | None:
    """The argmax share that attention without any preference would show; None if not recorded."""
    values = [run.value("chance_floor") for run in records.runs]
    over = summarize([value for value in values if value is not None])
    return None if over is None else over.mean
