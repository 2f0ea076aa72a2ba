"""Records as one table: a row for each number that was measured."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from clearhead.records.runs import DIMENSIONS, Records, measure_key

if TYPE_CHECKING:
    import pandas

COLUMNS = (
    *("source", "label", "run", "arm", "seed", "metric", "value", "measure"),
    *("sequence_length", "vocabulary", "learning_rate", "at_edge"),
    *DIMENSIONS,
)


def frame(sources: Mapping[str, Records]) -> "pandas.DataFrame":
    """Every number of these records, a row each.

    Columns are the `source` (its name in `sources`), the run and its label, arm and seed, `metric`
    and `value` (NaN where none could be measured), the `measure` itself with its items, facts of
    the run's header, and a column for each dimension, in which NaN is "pooled over".
    """
    import pandas

    rows = [
        {
            "source": source,
            "label": run.label,
            "run": run.id,
            "arm": run.arm,
            "seed": run.seed,
            "metric": one.metric,
            "value": one.value,
            "measure": one,
            "sequence_length": run.sequence_length,
            "vocabulary": run.vocabulary,
            "learning_rate": (run.header.get("train") or {}).get("learning_rate"),
            "at_edge": run.at_edge,
            **dict(measure_key(one.metric, one.dimensions)[1]),
        }
        for source, records in sources.items()
        for run in records.runs
        for one in run.measures.values()
    ]
    table = pandas.DataFrame(rows, columns=list(COLUMNS))
    numbers = ("value", "sequence_length", "vocabulary", "learning_rate")
    table = table.astype(dict.fromkeys(numbers, float))
    words = table.select_dtypes("str").columns
    return table.astype(dict.fromkeys(words, "category"))
