"""Tasks of EleutherAI's lm-evaluation-harness (lm-eval), run by it, in this process."""

import contextlib
import copy
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, ClassVar

from tokenizers.processors import TemplateProcessing
from transformers import set_seed

from clearhead.errors import ClearheadError, NotFinite, require
from clearhead.eval.harness_tasks import EXTRA, Catalogue, check_names, no_downloaded_code
from clearhead.eval.options import HarnessOptions
from clearhead.eval.task import check_count
from clearhead.measure.rope_limits import follow_length, reset_dynamic_rope
from clearhead.measure.task import Advanced, Cell, Subject
from clearhead.models.inspection import begin_of_windows, evaluating, finite
from clearhead.models.pretrained import CACHE
from clearhead.records.cells import lines_of, unmeasured
from clearhead.records.runs import Line
from clearhead.terminal import hushed

_CACHES = (CACHE, "past_key_values", "cache_params")  # of a step of generation
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
            try:
                found = evaluate_tasks(
                    subject.model,
                    subject.tokenizer,
                    loaded,
                    name,
                    batch_tokens=subject.batch_tokens,
                    advanced=advanced,
                    limit=self.limit,
                    shots=self.shots,
                    seed=subject.seed,
                )
            except NotFinite as error:
                stated = known.config(name).get("metric_list") or [{"metric": "acc"}]
                return unmeasured([str(one["metric"]) for one in stated], error)
        cut = found["requests_cut"]
        numbers = {one: metrics_of(row) for one, row in found["results"].items()}
        own = numbers.pop(name, {})
        counts = [one["effective"] for one in found["n-samples"].values()]
        shown = [key for key in own if not key.endswith("_stderr")]
        result = {
            **own,
            "requests_cut": cut,
            "items": sum(counts),
            **({"shots_of": found["n-shot"]} if numbers else {"shots": found["n-shot"].get(name)}),
            "lm_eval": version("lm_eval"),
            **({"members": numbers} if numbers else {}),
        }
        # Prompts too long for the model lose their beginning, shots first: then it is shown.
        return lines_of([*shown, "requests_cut"] if cut else shown, result)


def evaluate_tasks(
    model: Any,
    tokenizer: Any,
    loaded: Mapping[str, Any],
    name: str,
    *,
    batch_tokens: int,
    advanced: Advanced,
    limit: int | None = None,
    shots: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Run loaded tasks by lm-eval's evaluator.

    Args:
        name: of what is evaluated, for errors.
        batch_tokens, advanced: as `harness_model` takes them.
        limit: items of each task, its first.
        shots: examples before each question; None leaves the number to the task.

    Returns:
        lm-eval's results, and "requests_cut", the number of prompts that lost their beginning.

    Raises:
        ClearheadError: what lm-eval refuses; logits that are not finite.
    """
    evaluator = require("lm_eval.evaluator", EXTRA)
    with quiet(), evaluating(model), harness_model(model, tokenizer, batch_tokens, advanced) as lm:
        try:
            set_seed(seed)
            for task in loaded["tasks"].values():
                _prepare(task, shots, seed)
            found = evaluator.evaluate(lm=lm, task_dict=loaded, limit=limit, log_samples=True)
        except _REFUSALS as error:
            reason = next(iter(str(error).splitlines()), "an answer that the model has no room for")
            raise ClearheadError(f"lm-eval cannot run the task {name}: {reason}") from error
        return {**found, "requests_cut": _cut(lm, found["samples"])}


def _cut(lm: Any, samples: Mapping[str, list[dict[str, Any]]]) -> int:
    """The number of prompts whose beginning lm-eval left out."""
    cut = 0
    for rows in samples.values():
        # lm-eval lists a document for each of its filters.
        for row in {row["doc_id"]: row for row in rows}.values():
            for context, *answer in row["arguments"]:
                if not answer:  # a text to score is read in windows
                    continue
                if isinstance(answer[0], str):
                    room, text = lm.max_length + 1, context + answer[0]
                else:
                    written = answer[0].get("max_gen_toks", lm.max_gen_toks)
                    room, text = lm.max_length - written, context
                cut += len(lm.tok_encode(text)) > room
    return cut


def _prepare(task: Any, shots: int | None, seed: int) -> None:
    """Set shots and seed as lm-eval's `simple_evaluate` does, which also asks git and pip."""
    stated = task.get_config("num_fewshot")
    if stated is None or (shots is not None and stated != 0):
        task.set_config(key="num_fewshot", value=shots or 0)
    task.set_fewshot_seed(seed=seed)


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


@contextlib.contextmanager
def harness_model(
    model: Any, tokenizer: Any, batch_tokens: int, advanced: Advanced
) -> Iterator[Any]:
    """A model as lm-eval takes it (`HFLM`), its log-softmax in float32.

    The begin token of a model that was trained with one first in every window stands before each
    prompt, and in place of the first token of what is cut: windows of a text, prompts too long.

    Args:
        batch_tokens: tokens in a batch, at the model's longest text.
        advanced: called with the number of rows of each batch.
    """
    huggingface = require("lm_eval.models.huggingface", EXTRA)
    begin = begin_of_windows(model)
    tokenizer = copy.deepcopy(tokenizer)  # it is given a token for padding
    if begin is not None:
        token = tokenizer.convert_ids_to_tokens(begin)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=[token, "$A"], special_tokens=[(token, begin)]
        )
    lm = huggingface.HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        softmax_dtype="float32",
        trust_remote_code=False,  # both are loaded
        add_bos_token=None if begin is None else True,
        prefix_token_id=begin,
    )
    rows = max(1, batch_tokens // lm.max_length)
    lm.batch_size_per_gpu = 1 if follow_length(model) else rows  # padding is not exact there
    if begin is not None:
        score_texts = lm.loglikelihood_rolling

        def rolling(requests: Any) -> Any:  # whose first window has the begin token already
            lm.add_bos_token = False
            try:
                return score_texts(requests)
            finally:
                lm.add_bos_token = True

        lm.loglikelihood_rolling = rolling

    resetting: list[bool] = []

    def before(_module: Any, words: tuple[Any, ...], options: dict[str, Any]) -> Any:
        ids_BT, mask_BT = words[0] if words else options["input_ids"], options.get("attention_mask")
        step = ids_BT.shape[1] == 1 and any(options.get(name) is not None for name in _CACHES)
        if resetting or step:
            return None
        resetting.append(True)  # which calls the model, too
        reset_dynamic_rope(model)
        resetting.clear()
        advanced(len(ids_BT))
        if begin is None:
            return None
        ids_BT = ids_BT.clone()
        ids_BT[slice(None) if mask_BT is None else mask_BT[:, 0] == 1, 0] = begin
        return (), {**options, "input_ids": ids_BT}

    def after(_module: Any, _words: Any, options: dict[str, Any], out: Any) -> None:
        # Places that only pad a prompt may hold anything.
        finite(out.logits if options.get("attention_mask") is None else out.logits[:, -1])

    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield lm
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without lm-eval's own output: lines, bars of progress, and warnings of what is meant here."""
    modules = [require(name, EXTRA) for name in ("lm_eval.api.task", "lm_eval.models.huggingface")]
    bars = [vars(module)["tqdm"] for module in modules]
    for module, bar in zip(modules, bars, strict=True):
        vars(module)["tqdm"] = partial(bar, disable=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()), hushed("lm_eval"):
            yield
    finally:
        for module, bar in zip(modules, bars, strict=True):
            vars(module)["tqdm"] = bar
