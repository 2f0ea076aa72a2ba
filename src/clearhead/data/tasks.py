"""Classification tasks: GLUE's nine, Banking-77, and others by their fields."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Task:
    """Fields of a row, and the metric for its answers.

    Attributes:
        name: shown in records and messages.
        text, pair, label: fields of a row; `pair`, a second text, is None where there is one text.
        classes: names in the order of their indices; empty for those of the training rows.
        regression: whether labels are numbers.
        metrics: names of `clearhead.eval.METRICS`; the first is the task's own.
        train, validation: `hf:` names, used where no files are given; each validation set with the
            name of its split in records.
    """

    name: str
    text: str = "text"
    pair: str | None = None
    label: str = "label"
    classes: tuple[str, ...] = ()
    regression: bool = False
    metrics: tuple[str, ...] = ("accuracy",)
    train: str | None = None
    validation: tuple[tuple[str, str], ...] = ()


def _glue(name: str, fields: str, classes: str, *metrics: str) -> Task:
    text, *pair = fields.split()
    splits = [f"validation_{part}" for part in ("matched", "mismatched")]
    data = f"hf:nyu-mll/glue:{name}"
    return Task(
        name=name,
        text=text,
        pair=pair[0] if pair else None,
        classes=tuple(classes.split()),
        regression=not classes,
        metrics=metrics,
        train=f"{data}#train",
        validation=tuple(
            (split, f"{data}#{split}") for split in (splits if name == "mnli" else ["validation"])
        ),
    )


_SENTENCES, _QUESTIONS = "sentence1 sentence2", "question1 question2"
_ENTAILMENT = "entailment not_entailment"

GLUE = {
    task.name: task
    for task in (
        _glue("cola", "sentence", "unacceptable acceptable", "mcc", "accuracy"),
        _glue("sst2", "sentence", "negative positive", "accuracy"),
        _glue("mrpc", _SENTENCES, "not_equivalent equivalent", "f1", "accuracy"),
        _glue("stsb", _SENTENCES, "", "pearson"),
        _glue("qqp", _QUESTIONS, "not_duplicate duplicate", "f1", "accuracy"),
        _glue("mnli", "premise hypothesis", "entailment neutral contradiction", "accuracy"),
        _glue("qnli", "question sentence", _ENTAILMENT, "accuracy"),
        _glue("rte", _SENTENCES, _ENTAILMENT, "accuracy"),
        _glue("wnli", _SENTENCES, "not_entailment entailment", "accuracy"),
    )
}
"""The tasks of GLUE by name, with metrics and classes as in its data sets (arXiv 1804.07461).

The first metric of a task is the one that the crammed BERT and SAS report.
"""

BANKING = "hf:legacy-datasets/banking77"
"""Banking-77: 77 intents, 10,003 training and 3,080 test questions (arXiv 2003.04807, CC BY 4.0).

The authors' own PolyAI/banking77 is a loading script, which `datasets` has refused since 4.0; this
is the hub's conversion of it.
"""
TASKS = GLUE | {
    "banking77": Task(
        name="banking77", train=f"{BANKING}#train", validation=(("test", f"{BANKING}#test"),)
    )
}
"""The tasks that `clearhead finetune --task` knows."""
