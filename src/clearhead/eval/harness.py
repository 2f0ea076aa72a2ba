"""Tasks of EleutherAI's lm-evaluation-harness (lm-eval), run in this process."""

import contextlib
import copy
import difflib
import hashlib
import io
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tokenizers.processors import TemplateProcessing
from transformers import set_seed

from clearhead.errors import ClearheadError, first_line, require
from clearhead.measure.answers import follow_length, reset_dynamic_rope
from clearhead.measure.sweep import Cell, Subject
from clearhead.models.inspection import begin_of_windows, evaluating, finite
from clearhead.records.cells import lines_of
from clearhead.records.runs import Line
from clearhead.settings.eval import HarnessOptions
from clearhead.terminal import hushed, say

EXTRA = "lm-eval"
_TASKS = ("TASK", "PY_TASK")  # kinds of entries that are one task
# Raised by lm-eval for a task that does not fit: the model's length, a package, a metric, its data.
_REFUSALS = (AssertionError, ImportError, LookupError, OSError, TypeError, ValueError)


class HarnessTask(HarnessOptions):
    """Tasks, groups and tags of lm-eval by its own names, one cell each."""

    headlines = ("acc",)  # of a model whose logits are not finite

    def cells(self, subject: Subject) -> list[Cell]:
        if not self.tasks:
            raise ClearheadError("lm_eval needs tasks: for example --tasks hellaswag arc_easy")
        index = _manager(self.include_path, self.tasks).task_index
        digest = _digest(self.include_path)
        cells: list[Cell] = []
        for name in dict.fromkeys(self.tasks):
            config = index[name].cfg or {}
            stated, own = (config.get("metadata") or {}).get("version"), config.get("num_fewshot")
            shots = own if own == 0 or self.shots is None else self.shots
            if shots is None:  # of a group each member may say its own
                shots = 0 if index[name].kind.name in _TASKS else "as defined"
            version = {} if stated is None else {"version": str(stated)}
            cells.append({"task": name, **version, "shots": shots, "digest": digest})
        return cells

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        """A group's own numbers if it has some; for other groups and for tags each task's."""
        name, manager = str(cell["task"]), _manager(self.include_path, self.tasks)
        with _quiet(), _no_downloaded_code(name):
            results = self._evaluated(subject, manager, name)
        numbers = {one: _metrics(row) for one, row in results["results"].items()}
        items = {one: counts["effective"] for one, counts in results["n-samples"].items()}
        lines = []
        for one, row in {name: numbers[name]}.items() if numbers.get(name) else numbers.items():
            details = {"items": items.get(one, sum(items.values())), "lm_eval": version("lm_eval")}
            where = {"task": one} | ({} if one == name else {"shots": results["n-shot"].get(one)})
            shown = [metric for metric in row if not metric.endswith("_stderr")]
            lines += [{**line, **where} for line in lines_of(shown, **row, **details)]
        return lines

    def _evaluated(self, subject: Subject, manager: Any, name: str) -> dict[str, Any]:
        evaluate = require("lm_eval.evaluator", EXTRA).evaluate
        try:
            loaded = manager.load([name])
        except Exception as error:  # datasets, the hub and lm-eval each raise their own
            advice = ": without the hub, give --lm-eval.include-path, a folder of local tasks"
            reason = f"({first_line(error) or repr(error)}){advice * isinstance(error, OSError)}"
            raise ClearheadError(f"lm-eval cannot load the task {name} {reason}") from error
        with evaluating(subject.model), harness_model(subject) as lm:
            try:
                set_seed(subject.seed)
                # As lm-eval's `simple_evaluate` does, which also asks git and pip.
                for task in loaded["tasks"].values():
                    own = task.get_config("num_fewshot")
                    if own is None or (self.shots is not None and own != 0):
                        task.set_config(key="num_fewshot", value=self.shots or 0)
                    task.set_fewshot_seed(seed=subject.seed)
                return dict(evaluate(lm, loaded, limit=self.limit, log_samples=True))
            except _REFUSALS as error:
                reason = first_line(error) or "an answer that the model has no room for"
                raise ClearheadError(f"lm-eval cannot run the task {name}: {reason}") from error


def _manager(folder: str, names: Sequence[str]) -> Any:
    """lm-eval's index of tasks; only the folder's if it has all names: lm-eval's take seconds."""
    if folder:
        if not Path(folder).is_dir():
            raise ClearheadError(f"include path {folder!r} is no folder of lm-eval's task files")
        make = require("lm_eval.tasks", EXTRA).TaskManager
        own = make(include_path=folder, include_defaults=False)
        tasks = {name for name, entry in own.task_index.items() if entry.kind.name in _TASKS}
        if tasks.issuperset(names):
            return own
    return _all_tasks(folder)


@cache
def _all_tasks(folder: str) -> Any:
    return require("lm_eval.tasks", EXTRA).TaskManager(include_path=folder or None)


def _digest(folder: str) -> str:
    """A hash of lm-eval's version and, for a folder, of all files in it."""
    digest = hashlib.sha256(version("lm_eval").encode())
    for path in sorted(Path(folder).rglob("*")) if folder else ():
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def check_names(names: Sequence[str], folder: str, others: Iterable[str] = ()) -> None:
    """Refuse names that lm-eval does not know; `others` are allowed too, for the advice."""
    ours = sorted(others)
    if find_spec("lm_eval") is None:
        fault = f"task {names[0]!r} is none of clearhead's own ({', '.join(ours)})"
        raise ClearheadError(f"{fault}; lm-eval's need: pip install 'clearhead[{EXTRA}]'")
    known = _manager(folder, names).all_tasks
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, [*ours, *known], n=3, cutoff=0.6)
            listed = f"`lm-eval ls tasks` lists the {len(known):,} of lm-eval"
            hint = f"did you mean {' or '.join(near)}?" if near else listed
            raise ClearheadError(f"unknown task {name!r}: {hint}")


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    """ "acc,none" as "acc", "acc_stderr,none" as "acc_stderr", others as they are."""
    values = {}
    for key, value in row.items():
        metric, comma, kind = str(key).partition(",")
        if comma and isinstance(value, int | float):
            name, stderr, _ = metric.partition("_stderr")
            values[name + ("" if kind == "none" else f",{kind}") + stderr] = float(value)
    return values


@contextlib.contextmanager
def harness_model(subject: Subject) -> Iterator[Any]:
    """lm-eval's wrapper of a model (`HFLM`), its log-softmax in float32. A model trained with a
    begin token first in every window gets it before each prompt, and in place of the first token of
    a text's windows and of truncated prompts."""
    model, begin = subject.model, begin_of_windows(subject.model)
    tokenizer = copy.deepcopy(subject.tokenizer)  # it is given a token for padding
    if begin is not None:
        token = tokenizer.convert_ids_to_tokens(begin)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=[token, "$A"], special_tokens=[(token, begin)]
        )
    lm = require("lm_eval.models.huggingface", EXTRA).HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        softmax_dtype="float32",
        trust_remote_code=False,  # both are loaded
        add_bos_token=None if begin is None else True,
        prefix_token_id=begin,
    )
    rows = max(1, subject.batch_tokens // lm.max_length)
    lm.batch_size_per_gpu = 1 if follow_length(model) else rows  # padding is not exact there
    score_texts = lm.loglikelihood_rolling

    def rolling(requests: Any) -> Any:  # the first window has the begin token already
        with patch.object(lm, "add_bos_token", None if begin is None else False):
            return score_texts(requests)

    lm.loglikelihood_rolling = rolling

    def before(_module: Any, words: tuple[Any, ...], options: dict[str, Any]) -> Any:
        ids_BT, mask_BT = words[0] if words else options["input_ids"], options.get("attention_mask")
        if ids_BT.shape[1] == 1:  # a step of writing
            return None
        reset_dynamic_rope(model)
        if begin is None:
            return None
        ids_BT = ids_BT.clone()
        ids_BT[slice(None) if mask_BT is None else mask_BT[:, 0] == 1, 0] = begin
        return (), {**options, "input_ids": ids_BT}

    def after(_module: Any, _words: Any, options: dict[str, Any], out: Any) -> None:
        # Places that only pad a prompt may hold anything.
        finite(out.logits if options.get("attention_mask") is None else out.logits[:, -1])

    with (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ):
        yield lm


@contextlib.contextmanager
def _no_downloaded_code(name: str) -> Iterator[None]:
    """Refuse programs that `evaluate` downloads as metrics; at the end: tasks hide errors."""
    require("evaluate.loading", EXTRA)
    target = "evaluate.loading.evaluation_module_factory"
    with patch(target, side_effect=ClearheadError("no downloaded metrics")) as factory:
        try:
            yield
        finally:
            if factory.called:
                metric = Path(factory.call_args.args[0]).name
                how = f"computes {metric} by a program that `evaluate` downloads"
                raise ClearheadError(f"the task {name} {how}: run lm-eval itself")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Run the body without lm-eval's output but for the first prompt that it truncates."""
    tqdm = require("tqdm", EXTRA).tqdm
    start, warned = tqdm.__init__, set[str]()

    def silent(bar: Any, *words: Any, **options: Any) -> None:
        start(bar, *words, **{**options, "disable": True})

    def warn(message: object, *_: Any) -> None:
        if "runcat" in str(message) and not warned:  # truncated, Truncation
            warned.add(str(message))
            say(f"lm-eval: {message}")

    cuts = logging.getLogger("lm_eval.models.huggingface")
    with (
        patch.object(tqdm, "__init__", silent),
        patch.object(cuts, "warning", warn),
        contextlib.redirect_stdout(io.StringIO()),
        hushed("lm_eval"),
    ):
        yield
