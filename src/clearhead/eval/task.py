"""Words, cells and files that several evaluation tasks share."""

from collections.abc import Sequence
from functools import lru_cache

from clearhead.data import DataConfig, hub, labelled
from clearhead.data.tasks import Task
from clearhead.measure.task import Cell
from clearhead.terminal import say


def parted(words: Sequence[str]) -> list[str]:
    """Split words at commas; each word once."""
    return list(dict.fromkeys(filter(None, (one for word in words for one in word.split(",")))))


def by_depth(lengths: Sequence[int], depths: Sequence[float]) -> list[Cell]:
    """A cell for each length and depth: of growing depths, as filler that is cached only grows."""
    return [{"length": length, "depth": depth} for length in lengths for depth in sorted(depths)]


def labelled_rows(source: str, fields: Task, options: str) -> list[labelled.Row]:
    """Rows of a file; or of a data set, which is read once for all cells.

    Args:
        fields: the rows' fields. options: the start of the options that name them, for errors.
    """
    return (_streamed if hub.is_hub(source) else _read)(source, fields, options)


def _read(source: str, fields: Task, options: str) -> list[labelled.Row]:
    cache = DataConfig().cache_folder
    return labelled.read_rows(source, fields, cache=cache, progress=say, options=options)


_streamed = lru_cache(maxsize=8)(_read)
