"""Tasks of EleutherAI's lm-evaluation-harness (lm-eval), run by it, in this process."""

import contextlib
import copy
import io
import logging
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np
import torch

from clearhead.diagnose.running import evaluating
from clearhead.errors import ClearheadError, require
from clearhead.eval.frequencies import follow_length, of_the_batch
from clearhead.eval.harness_tasks import EXTRA, Catalogue, check_names, no_downloaded_code
from clearhead.eval.task import LISTED, Advanced, Cell, Subject, check_count

# What lm-eval raises where a task does not fit: the model's length, a package, a metric, its data.
_REFUSALS = (AssertionError, ImportError, LookupError, OSError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class HarnessTask:
    """Tasks of lm-eval by their names there, on its prompts, its data and its metrics."""

    headlines: ClassVar[tuple[str, ...]] = ()  # as the tasks have them: found with the numbers

    tasks: tuple[str, ...] = field(default=(), metadata=LISTED)
    """Tasks, groups and tags of lm-eval; --tasks takes their names too."""
    shots: int | None = None
    """Examples before each question; unless given, as many as the task says."""
    limit: int | None = None
    """Items of each task, its first; unless given, all."""
    include_path: str = ""
    """A folder of your own task files (.yaml); the functions and templates in them are run."""

    def cells(self, subject: Subject) -> list[Cell]:
        if not self.tasks:
            raise ClearheadError("lm_eval needs tasks: for example --tasks hellaswag arc_easy")
        check_names(self.tasks, self.include_path)
        if self.limit is not None:
            check_count(limit=self.limit)
        if self.shots is not None and self.shots < 0:
            raise ClearheadError(f"shots are {self.shots}: 0 or more")
        if of_the_batch(subject.model):
            raise ClearheadError(
                "lm-eval reads texts of unequal length together, for which this model would take "
                "one dynamic frequency: leave that scaling out, or give --tasks choices"
            )
        known = Catalogue(self.include_path, self.tasks)
        names = dict.fromkeys(one for name in self.tasks for one in known.expanded(name))
        return [self._cell(known, name) for name in names]

    def _cell(self, known: Catalogue, name: str) -> Cell:
        config = known.config(name)
        said = config.get("num_fewshot")
        if self.shots and said == 0:
            raise ClearheadError(
                f"shots have no effect on {name}, which lm-eval defines without: leave them out"
            )
        shots = said if self.shots is None else self.shots
        stated = (config.get("metadata") or {}).get("version")
        return {
            "task": name,
            **({} if stated is None else {"version": str(stated)}),
            # Of a group each member may say its own.
            "shots": shots if shots is not None else "as defined" if "group" in config else 0,
            "digest": known.digest(name),
        }

    def measure(self, subject: Subject, cell: Cell, advanced: Advanced) -> dict[str, Any]:
        """Every metric by lm-eval's name for it, with `NAME_stderr` where lm-eval gives one."""
        name = str(cell["task"])
        evaluator = require("lm_eval.evaluator", EXTRA)
        known = Catalogue(self.include_path, self.tasks)
        with quiet(), no_downloaded_code(name), evaluating(subject.model):
            loaded = known.load(name)
            try:
                _seed(subject.seed)
                for task in loaded["tasks"].values():
                    self._prepare(task, subject.seed)
                model = _harness_model(subject, advanced)
                found = evaluator.evaluate(
                    lm=model,
                    task_dict=loaded,
                    limit=self.limit,
                    log_samples=False,
                )
            except _REFUSALS as error:
                reason = next(iter(str(error).splitlines()), repr(error))
                raise ClearheadError(f"lm-eval cannot run the task {name}: {reason}") from error
        numbers = {one: _numbers(row) for one, row in found["results"].items()}
        own = numbers.pop(name, {})
        counts = [one["effective"] for one in found["n-samples"].values()]
        shown = [key for key in own if not key.endswith("_stderr")]
        return {
            **own,
            # Prompts too long for the model lose their beginning, shots first: then it is shown.
            "headlines": [*shown, "requests_cut"] if model.cut else shown,
            "requests_cut": model.cut,
            "items": sum(counts),
            "shots": found["n-shot"].get(name) if not numbers else found["n-shot"],
            "lm_eval": version("lm_eval"),
            **({"members": numbers} if numbers else {}),
        }

    def _prepare(self, task: Any, seed: int) -> None:
        """As lm-eval's `simple_evaluate` does, which also asks git and pip about the machine."""
        said = task.get_config("num_fewshot")
        if said is None or (self.shots is not None and said != 0):
            task.set_config(key="num_fewshot", value=self.shots or 0)
        task.set_fewshot_seed(seed=seed)


def _seed(seed: int) -> None:
    """What tasks draw by; lm-eval's `--seed` sets the same."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """lm-eval's "acc,none" as "acc", "exact_match,strict-match" as it is; no "N/A".

    The standard error of NAME is NAME_stderr.
    """
    found = {}
    for key, value in row.items():
        metric, comma, kind = str(key).partition(",")
        if comma and isinstance(value, int | float):
            plain = metric.removesuffix("_stderr")
            end = metric[len(plain) :]
            found[f"{plain}{'' if kind == 'none' else comma + kind}{end}"] = float(value)
    return found


def _harness_model(subject: Subject, advanced: Advanced) -> Any:
    """The model as lm-eval takes it."""
    huggingface = require("lm_eval.models.huggingface", EXTRA)

    class Reporting(huggingface.HFLM):  # type: ignore[misc, name-defined]
        """Tells `advanced` instead of drawing bars of its own."""

        def _model_call(self, inps: Any, *args: Any, **kwargs: Any) -> Any:
            found = super()._model_call(inps, *args, **kwargs)
            advanced(len(inps))
            return found

        def _model_generate(self, context: Any, *args: Any, **kwargs: Any) -> Any:
            found = super()._model_generate(context, *args, **kwargs)
            advanced(len(context))
            return found

        cut = 0

        def _loglikelihood_tokens(self, requests: Any, *_args: Any, **kwargs: Any) -> Any:
            sizes = [len(context) + len(answer) - 1 for _, context, answer in requests]
            self.cut += sum(size > self.max_length for size in sizes)
            return super()._loglikelihood_tokens(requests, **{**kwargs, "disable_tqdm": True})

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return super().generate_until(requests, disable_tqdm=True)

    model = Reporting(
        pretrained=subject.model,
        tokenizer=copy.deepcopy(subject.tokenizer),  # it is given a token for padding
        batch_size=1,
        trust_remote_code=False,  # both are loaded
    )
    if not follow_length(subject.model):  # padding makes a text longer
        model.batch_size_per_gpu = max(1, subject.batch_tokens // model.max_length)
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what lm-eval prints of what it does, and its warnings of what is meant here."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
