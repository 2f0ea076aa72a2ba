"""Documents with something to answer or to sum up, from files.

The fields of a row tell what is asked:

    question, answers, passage (Natural Questions with its passage; a title, if any, before it)
    question, answers, contexts of title and text (HotpotQA)
    input, answers, context (LongBench; an empty input asks for a summary)
    text, summaries (SciTLDR); document, summary (XSum); article, highlights (CNN/DailyMail)
    text, questions of question and summaries (SQuALITY); text, queries of query and answer (QMSum)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clearhead.data import DataConfig, hub
from clearhead.data.readers import JSON_LINES, ending, json_rows
from clearhead.errors import ClearheadError
from clearhead.terminal import say

Kind = Literal["answer", "summary"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing asked of one document.

    Attributes:
        question: empty where a summary of the whole is asked for.
        references: the right answers, or people's summaries; at least one.
    """

    kind: Kind
    document: str
    question: str
    references: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Form:
    """The fields of a row; where `several` names a list, question and references are in each."""

    kind: Kind
    document: str
    references: str
    question: str | None = None
    several: str | None = None

    @property
    def needs(self) -> list[str]:
        inner = [field for field in (self.question, self.references) if field is not None]
        return [self.document, *([self.several] if self.several else inner)]


_FORMS = (
    _Form(kind="answer", document="passage", question="question", references="answers"),
    _Form(kind="answer", document="contexts", question="question", references="answers"),
    _Form(kind="answer", document="context", question="input", references="answers"),
    _Form(kind="summary", document="text", references="summaries"),
    _Form(kind="summary", document="document", references="summary"),
    _Form(kind="summary", document="article", references="highlights"),
    _Form(
        kind="summary",
        document="text",
        several="questions",
        question="question",
        references="summaries",
    ),
    _Form(
        kind="summary", document="text", several="queries", question="query", references="answer"
    ),
)


def local(source: str) -> Path:
    """The file of a source: a .jsonl or .jsonl.gz file, or `hf:NAME[:CONFIG][#SPLIT]`.

    A data set of the hub is downloaded into the cache once.

    Raises:
        ClearheadError: where there is neither.
    """
    if hub.is_hub(source):
        return hub.download_rows(source, DataConfig().cache_folder, say)
    path = Path(source)
    if not path.is_file() or ending(path) not in JSON_LINES:
        raise ClearheadError(
            f"{source!r}: no such file; give a .jsonl or .jsonl.gz file, or hf:NAME"
        )
    return path


def load_cases(source: str) -> list[Case]:
    """The cases of a source.

    Raises:
        ClearheadError: a file that cannot be read, a row without its fields, naming those and what
            it has, rows of several forms, or no row.
    """
    found: list[Case] = []
    known: _Form | None = None
    for number, (where, row) in enumerate(json_rows(local(source)), start=1):
        if hub.is_hub(source):  # the copy's name says nothing to a person
            where = f"{source}, row {number}"
        if not isinstance(row, dict):
            raise ClearheadError(f"{where} is no object of fields")
        form = _form(row, where)
        if form is not (known := known or form):
            raise ClearheadError(
                f"{where} has {', '.join(form.needs)}, and the rows before it "
                f"{', '.join(known.needs)}: give a file for each"
            )
        found += _cases(form, row, where)
    if not found:
        raise ClearheadError(f"{source} has nothing to ask: give a row a line, with {_all_forms()}")
    return found


def _form(row: Mapping[str, Any], where: str) -> _Form:
    """The form whose fields the row has; else what the nearest one lacks is the error."""

    def lacking(form: _Form) -> list[str]:
        return [field for field in form.needs if field not in row]

    form = min(_FORMS, key=lambda form: len(lacking(form)) / len(form.needs))
    if missing := lacking(form):
        has = f"it has {', '.join(row) or 'nothing'}"
        if len(missing) == len(form.needs):
            raise ClearheadError(f"{where} lacks {_all_forms()}; {has}")
        raise ClearheadError(
            f"{where} lacks {' and '.join(missing)} (a row has {', '.join(form.needs)}); {has}"
        )
    return form


def _cases(form: _Form, row: Mapping[str, Any], where: str) -> Iterator[Case]:
    document = _document(form, row, where)
    parts: list[tuple[str, Mapping[str, Any]]] = [(where, row)]
    if form.several is not None:
        inner = row[form.several]
        if not isinstance(inner, list) or not all(isinstance(part, dict) for part in inner):
            raise _not(where, form.several, "a list of objects", inner)
        parts = [(f"{where}, {form.several} {n}", part) for n, part in enumerate(inner, start=1)]
    for place, part in parts:
        for field in (form.question, form.references):
            if field is not None and field not in part:
                raise ClearheadError(
                    f"{place} lacks {field}; it has {', '.join(part) or 'nothing'}"
                )
        question = "" if form.question is None else part[form.question]
        if not isinstance(question, str):
            raise _not(place, str(form.question), "a text", question)
        question = " ".join(question.split())
        if not question and form.question not in (None, "input"):
            raise ClearheadError(f"{place}: {form.question} is empty")
        yield Case(
            kind=form.kind if question else "summary",
            document=document,
            question=question,
            references=_texts(part[form.references], place, form.references),
        )


def _document(form: _Form, row: Mapping[str, Any], where: str) -> str:
    value = row[form.document]
    if form.document != "contexts":
        if not isinstance(value, str) or not value.strip():
            raise _not(where, form.document, "a text", value)
        title = row.get("title") if form.document == "passage" else None
        return f"{title}\n{value.strip()}" if isinstance(title, str) and title else value.strip()
    if not isinstance(value, list) or not value:
        raise _not(where, form.document, "a list of objects", value)
    found = []
    for number, part in enumerate(value, start=1):
        if not isinstance(part, dict):
            raise _not(where, form.document, "a list of objects", value)
        if missing := [field for field in ("title", "text") if field not in part]:
            has = ", ".join(part) or "nothing"
            raise ClearheadError(
                f"{where}, {form.document} {number} lacks {' and '.join(missing)}; it has {has}"
            )
        found.append(f"{part['title']}\n{part['text']}".strip())
    return "\n\n".join(found)


def _texts(value: Any, where: str, field: str) -> tuple[str, ...]:
    """A text, or several; each with something in it."""
    several = [value] if isinstance(value, str) else value
    good = isinstance(several, list) and several
    if not good or not all(isinstance(text, str) and text.strip() for text in several):
        raise _not(where, field, "a text, or a list of them,", value)
    return tuple(text.strip() for text in several)


def _not(where: str, field: str, kind: str, found: Any) -> ClearheadError:
    return ClearheadError(f"{where}: {field} must be {kind} and not empty; found {found!r:.60}")


def _all_forms() -> str:
    """What rows may have, in words."""
    return " or ".join(", ".join(form.needs) for form in _FORMS)
