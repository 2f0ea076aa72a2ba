"""Tasks of EleutherAI's lm-evaluation-harness (lm-eval), run by it, in this process."""

import contextlib
import copy
import io
import logging
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.errors import ClearheadError, NotFinite, require
from clearhead.eval.harness_tasks import EXTRA, Catalogue, check_names, no_downloaded_code
from clearhead.eval.options import HarnessOptions
from clearhead.eval.rope_limits import follow_length, reset_dynamic_rope
from clearhead.eval.task import Subject, check_count
from clearhead.measure.task import Advanced, Cell
from clearhead.models.inspection import begin_of_windows, evaluating, finite, opened
from clearhead.records.cells import lines_of, unmeasured
from clearhead.records.runs import Line

# Raised by lm-eval for a task that does not fit: the model's length, a package, a metric, its data.
_REFUSALS = (AssertionError, ImportError, LookupError, OSError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class HarnessTask(HarnessOptions):
    """Tasks of lm-eval by their names there, on its prompts, its data and its metrics."""

    drawn: ClassVar[bool] = True

    def cells(self, subject: Subject) -> list[Cell]:
        if not self.tasks:
            raise ClearheadError("lm_eval needs tasks: for example --tasks hellaswag arc_easy")
        check_names(self.tasks, self.include_path)
        if self.limit is not None:
            check_count(limit=self.limit)
        if self.shots is not None and self.shots < 0:
            raise ClearheadError(f"shots are {self.shots}: 0 or more")
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

    def measure(self, subject: Subject, cell: Cell, advanced: Advanced) -> list[Line]:
        """Every metric by lm-eval's name for it, with `NAME_stderr` where lm-eval gives one."""
        name = str(cell["task"])
        known = Catalogue(self.include_path, self.tasks)
        with quiet(), no_downloaded_code(name):
            loaded = known.load(name)
            lm = harness_model(subject.model, subject.tokenizer, subject.batch_tokens, advanced)
            try:
                found = evaluate_tasks(
                    lm, loaded, name, limit=self.limit, shots=self.shots, seed=subject.seed
                )
            except NotFinite as error:
                stated = known.config(name).get("metric_list") or [{"metric": "acc"}]
                return unmeasured([str(one["metric"]) for one in stated], error)
        numbers = {one: metrics_of(row) for one, row in found["results"].items()}
        own = numbers.pop(name, {})
        counts = [one["effective"] for one in found["n-samples"].values()]
        shown = [key for key in own if not key.endswith("_stderr")]
        result = {
            **own,
            "requests_cut": lm.cut,
            "items": sum(counts),
            **({"shots_of": found["n-shot"]} if numbers else {"shots": found["n-shot"].get(name)}),
            "lm_eval": version("lm_eval"),
            **({"members": numbers} if numbers else {}),
        }
        # Prompts too long for the model lose their beginning, shots first: then it is shown.
        return lines_of([*shown, "requests_cut"] if lm.cut else shown, result)


def evaluate_tasks(
    lm: Any,
    loaded: Mapping[str, Any],
    name: str,
    *,
    limit: int | None = None,
    shots: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Run loaded tasks by lm-eval's evaluator, and return its results.

    Args:
        lm: as `harness_model` makes it.
        name: of what is evaluated, for errors.
        limit: items of each task, its first.
        shots: examples before each question; None leaves the number to the task.

    Raises:
        ClearheadError: what lm-eval refuses; a log-likelihood that is NaN.
    """
    evaluator = require("lm_eval.evaluator", EXTRA)
    with quiet(), evaluating(lm.model):
        try:
            _seed(seed)
            for task in loaded["tasks"].values():
                _prepare(task, shots, seed)
            return evaluator.evaluate(lm=lm, task_dict=loaded, limit=limit, log_samples=False)
        except _REFUSALS as error:
            reason = next(iter(str(error).splitlines()), repr(error))
            raise ClearheadError(f"lm-eval cannot run the task {name}: {reason}") from error


def _prepare(task: Any, shots: int | None, seed: int) -> None:
    """Set shots and seed as lm-eval's `simple_evaluate` does, which also asks git and pip."""
    stated = task.get_config("num_fewshot")
    if stated is None or (shots is not None and stated != 0):
        task.set_config(key="num_fewshot", value=shots or 0)
    task.set_fewshot_seed(seed=seed)


def _seed(seed: int) -> None:
    """Seed the generators that tasks draw from, the same as lm-eval's `--seed`."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
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


def harness_model(model: Any, tokenizer: Any, batch_tokens: int, advanced: Advanced) -> Any:
    """A model as lm-eval takes it, its log-softmax in float32.

    The begin token of a model that was trained with one first in every window stands before each
    prompt, and in place of the first token of what is cut: windows of a text, prompts too long.

    Args:
        batch_tokens: tokens in a batch, padding included.
        advanced: called with the number of rows of each batch.
    """
    huggingface = require("lm_eval.models.huggingface", EXTRA)
    begin = begin_of_windows(model)

    class Reporting(huggingface.HFLM):  # type: ignore[misc, name-defined]
        """Calls `advanced` instead of drawing bars of its own.

        Attributes:
            cut: texts to score, and prompts to continue, that lost their beginning.
        """

        cut = 0

        def _model_call(self, inps: Any, *args: Any, **kwargs: Any) -> Any:
            reset_dynamic_rope(self.model)
            found = super()._model_call(opened(self.model, inps), *args, **kwargs)
            advanced(len(inps))
            return found

        def tok_batch_encode(
            self, *args: Any, left_truncate_len: int | None = None, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            """Token ids and mask of prompts to continue, [B, T], padded on the left."""
            ids_BT, mask_BT = super().tok_batch_encode(*args, **kwargs)
            if begin is not None:
                opens_B = ((ids_BT == begin) & (mask_BT.cumsum(1) == 1)).any(1)
                ids_BT, mask_BT = (F.pad(one, (1, 0)) for one in (ids_BT, mask_BT))
                place = torch.arange(len(ids_BT)), (mask_BT == 0).sum(1) - 1 + opens_B.long()
                ids_BT[place], mask_BT[place] = begin, 1
            if not left_truncate_len:
                return ids_BT, mask_BT
            cut_B = mask_BT.sum(1) > left_truncate_len
            self.cut += int(cut_B.sum())
            ids_BT, mask_BT = (one[:, -left_truncate_len:] for one in (ids_BT, mask_BT))
            if begin is not None:
                ids_BT[cut_B, 0] = begin
            return ids_BT, mask_BT

        def _model_generate(self, context: Any, *args: Any, **kwargs: Any) -> Any:
            reset_dynamic_rope(self.model)
            checked = {**kwargs, "logits_processor": [finite]}
            found = super()._model_generate(context, *args, **checked)
            advanced(len(context))
            return found

        def _loglikelihood_tokens(self, requests: Any, *_args: Any, **kwargs: Any) -> Any:
            if begin is not None:
                requests = [
                    (text, [begin] * (text is not None and context[0] != begin) + context, answer)
                    for text, context, answer in requests  # windows of a text have no text here
                ]
            sizes = [len(context) + len(answer) - 1 for _, context, answer in requests]
            longest = max((len(answer) for _, _, answer in requests), default=0)
            if longest > self.max_length:  # which lm-eval asserts without a word
                raise ClearheadError(
                    f"an answer takes {longest} tokens, and the model reads {self.max_length}: "
                    "leave the task out, or give a smaller --lm-eval.limit"
                )
            self.cut += sum(size > self.max_length for size in sizes)
            self._batch_by(max(sizes, default=1))
            found = super()._loglikelihood_tokens(requests, **{**kwargs, "disable_tqdm": True})
            if any(math.isnan(score) for score, _ in found):
                raise NotFinite("the model's log-likelihood of an answer is NaN")
            return found

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> Any:
            self._batch_by(self.max_length)
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
            self._batch_by(self.max_length)
            return super().generate_until(requests, disable_tqdm=True)

        def _batch_by(self, longest: int) -> None:
            """Set the batch: rows of this length that fit; one where padding is not exact."""
            rows = batch_tokens // max(1, min(longest, self.max_length))
            self.batch_size_per_gpu = 1 if follow_length(self.model) else max(1, rows)

    return Reporting(
        pretrained=model,
        tokenizer=copy.deepcopy(tokenizer),  # it is given a token for padding
        batch_size=1,
        softmax_dtype="float32",
        trust_remote_code=False,  # both are loaded
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without lm-eval's own output: lines, bars of progress, and warnings of what is meant here."""
    module: Any = require("lm_eval.api.task", EXTRA)
    logger, bar = logging.getLogger("lm_eval"), module.tqdm
    level = logger.level
    logger.setLevel(logging.ERROR)
    module.tqdm = partial(bar, disable=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        module.tqdm = bar
        logger.setLevel(level)
