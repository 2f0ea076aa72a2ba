"""Tasks of EleutherAI's lm-evaluation-harness (lm-eval), found by name and loaded."""

import difflib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from glob import glob
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError, choose, require

EXTRA = "lm-eval"
_MODULES = ("*.yaml", "*.py")


class Catalogue:
    """The tasks of a folder of task files, and lm-eval's own.

    lm-eval reads its 14,000 files to know their names, which takes seconds: where a folder has all
    that is asked for, they are left alone.

    Args:
        folder: searched with all below it, before lm-eval's own; "" for these alone.
        names: what will be asked for.

    Attributes:
        manager: lm-eval's own, of these tasks.

    Raises:
        ClearheadError: where lm-eval is not installed, or there is no such folder.
    """

    def __init__(self, folder: str, names: Iterable[str]) -> None:
        self._folder = Path(folder) if folder else None
        if self._folder is not None and not self._folder.is_dir():
            raise ClearheadError(f"include path {folder!r} is no folder of lm-eval's task files")
        tasks = require("lm_eval.tasks", EXTRA)
        if folder:
            self.manager = tasks.TaskManager(include_path=folder, include_defaults=False)
        if not folder or not all(self._has(name) for name in names):
            self.manager = _all_tasks(folder)

    def expanded(self, name: str) -> list[str]:
        """A task or a group that has numbers of its own is itself; a tag, or another group, all of
        its members."""
        entry = self.manager.task_index[name]
        if entry.kind.name == "TAG":
            return sorted(entry.tags)
        members = (entry.cfg or {}).get("task")
        if _is_task(entry) or (entry.cfg or {}).get("aggregate_metric_list") or not members:
            return [name]
        if not all(isinstance(one, str) and one in self.manager.task_index for one in members):
            return [name]
        return [leaf for member in members for leaf in self.expanded(member)]

    def config(self, name: str) -> dict[str, Any]:
        """A task's file as a dictionary, its functions unread."""
        return self.manager.task_index[name].cfg or {}

    def digest(self, name: str) -> str:
        """A hash of lm-eval's version and, for a folder, of its task files and their local data.

        Data on the hub have no part in it: they are unknown before they are loaded.
        """
        found = hashlib.sha256(version("lm_eval").encode())
        place = self.manager.task_index[name].yaml_path
        folder = self._folder and self._folder.resolve()
        if folder is not None and place is not None and place.resolve().is_relative_to(folder):
            for path in sorted(path for kind in _MODULES for path in folder.rglob(kind)):
                found.update(path.read_bytes())
            for entry in self.manager.task_index.values():
                inside = entry.yaml_path and entry.yaml_path.resolve().is_relative_to(folder)
                for path in _data_files(entry.cfg or {}) if inside else ():
                    found.update(path.read_bytes())
        return found.hexdigest()[:12]

    def load(self, name: str) -> dict[str, Any]:
        """A task or group, with its data, as lm-eval's evaluator takes it.

        Raises:
            ClearheadError: where its data cannot be had, or its files are wrong.
        """
        try:
            return self.manager.load([name])
        except Exception as error:  # datasets, the hub and lm-eval each raise their own
            reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
            advice = (
                ": where the hub cannot be reached, give --lm-eval.include-path, a folder of "
                "tasks on local files"
            )
            raise ClearheadError(
                f"lm-eval cannot load the task {name} ({reason})"
                + (advice if isinstance(error, OSError) else "")
            ) from error

    def _has(self, name: Any) -> bool:
        """True if a task is here, with all its members."""
        entry = self.manager.task_index.get(name) if isinstance(name, str) else None
        if entry is None or _is_task(entry):
            return entry is not None
        return all(map(self._has, entry.tags if entry.cfg is None else entry.cfg["task"]))


@cache
def _all_tasks(folder: str) -> Any:
    return require("lm_eval.tasks", EXTRA).TaskManager(include_path=folder or None)


def check_names(names: Sequence[str], folder: str, others: Iterable[str] = ()) -> None:
    """Refuse names that lm-eval does not know.

    Args:
        others: names that would have done as well, for the advice.

    Raises:
        ClearheadError: naming what is near; or how to install lm-eval.
    """
    ours = list(others)
    if find_spec("lm_eval") is None and ours:
        for name in names:
            if difflib.get_close_matches(name, ours, n=1, cutoff=0.6):
                choose("task", name, ours)
        raise ClearheadError(
            f"task {names[0]!r} is none of clearhead's own ({', '.join(sorted(ours))}), and "
            f"lm-eval is not installed; it comes with an extra: pip install 'clearhead[{EXTRA}]'"
        )
    known = Catalogue(folder, names).manager.all_tasks
    where = f"clearhead's own are {', '.join(sorted(ours))}; " if ours else ""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, [*ours, *known], n=3, cutoff=0.6)
            hint = f"{where}`lm-eval ls tasks` lists the {len(known):,} of lm-eval"
            hint = f"did you mean {' or '.join(near)}?" if near else hint
            raise ClearheadError(f"unknown task {name!r}: {hint}")


@contextmanager
def no_downloaded_code(name: str) -> Iterator[None]:
    """Refuse the metrics of Hugging Face's `evaluate`, which are programs that it downloads.

    lm-eval's tasks ask for them in several ways, some of which hide the refusal; so it is raised
    again at the end.
    """
    loading: Any = require("evaluate.loading", EXTRA)
    asked: list[str] = []

    def refusal() -> ClearheadError:
        return ClearheadError(
            f"the task {name} computes {asked[0]} by a program that `evaluate` downloads, which "
            "clearhead does not run: leave it out, or run lm-eval itself"
        )

    def refuse(path: str, *_args: Any, **_kwargs: Any) -> Any:
        asked.append(Path(path).name)
        raise refusal()

    kept = loading.evaluation_module_factory
    loading.evaluation_module_factory = refuse
    try:
        yield
    except Exception as error:
        if asked:
            raise refusal() from error
        raise
    finally:
        loading.evaluation_module_factory = kept
    if asked:
        raise refusal()


def _is_task(entry: Any) -> bool:
    return entry is not None and entry.kind.name in ("TASK", "PY_TASK")


def _data_files(config: dict[str, Any]) -> list[Path]:
    """The local files that a task reads, of those that its file names, patterns among them."""
    given = config.get("dataset_kwargs") or {}
    files = given.get("data_files") or ()
    named = files.values() if isinstance(files, dict) else [files]
    words = [w for one in named for w in ([one] if isinstance(one, str) else one)]
    paths = [Path(given.get("data_dir") or "") / word for word in words]
    found = [
        one
        for path in paths
        for one in ([path] if path.is_file() else map(Path, glob(str(path), recursive=True)))
    ]
    return sorted(one for one in found if one.is_file())
