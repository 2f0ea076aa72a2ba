"""Prompts on documents: questions and summaries from files, with as much document as fits.

The fields of a row decide what is asked:

    question, answers, passage (Natural Questions with its passage; a title, if any, before it)
    question, answers, contexts of title and text (HotpotQA)
    input, answers, context (LongBench; an empty input asks for a summary)
    source, target (SciTLDR, the source in sentences); text, summaries; document, summary (XSum);
    article, highlights (CNN/DailyMail)
    text, questions of question and summaries (SQuALITY); text, queries of query and answer (QMSum)

One text serves all models: instructions, the document, then the question, so that questions on one
document share a prefix. Under a chat template it is the user's message; neither it nor the document
then yields a special token.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from clearhead.data import DataConfig, hub
from clearhead.data.readers import JSON_LINES, ending, json_rows
from clearhead.data.tokenizer import Encoder
from clearhead.errors import ClearheadError
from clearhead.eval.prefill import Prompt
from clearhead.eval.task import file_digest
from clearhead.terminal import say

Tokens = tuple[int, ...]
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


class _Form(NamedTuple):
    """Fields of a row. Where `several` names a list, question and references are in each of it."""

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
    _Form("answer", "passage", "answers", "question"),
    _Form("answer", "contexts", "answers", "question"),
    _Form("answer", "context", "answers", "input"),
    _Form("summary", "source", "target"),
    _Form("summary", "text", "summaries"),
    _Form("summary", "document", "summary"),
    _Form("summary", "article", "highlights"),
    _Form("summary", "text", "summaries", "question", several="questions"),
    _Form("summary", "text", "answer", "query", several="queries"),
)
_ANSWER = (
    "Answer the question from the document alone, in a few words.\n\n"
    "Document:\n{document}\n\nQuestion: {question}\nAnswer:"
)
_SUMMARY = (
    "Summarize the document in a few sentences, with nothing that it does not say.\n\n"
    "Document:\n{document}\n\nSummary:"
)
_QUESTION = (
    "Sum up what the document says about a question in a few sentences, with nothing that it "
    "does not say.\n\nDocument:\n{document}\n\nQuestion: {question}\nSummary:"
)
# A model that only continues texts goes on to the next question or document by itself.
_STOPS = {"answer": "\n", "summary": "\n\n"}


@dataclass(frozen=True, kw_only=True)
class DocumentPrompt:
    """A case as a prompt.

    Attributes:
        document: the part of the document in the prompt. cut: True if that is not all of it.
    """

    case: Case
    prompt: Prompt
    document: str
    cut: bool


class PromptTemplate:
    """Instructions, and a chat template if asked for, around the texts of one model.

    Args:
        tokenizer: a fast one.
        encoder: the same without special tokens.
        chat: True puts the tokenizer's chat template around the text.

    Raises:
        ClearheadError: a tokenizer without a chat template.
    """

    def __init__(self, tokenizer: Any, encoder: Encoder, *, chat: bool) -> None:
        self._tokenizer, self._encoder, self.chat = tokenizer, encoder, chat
        begin = () if encoder.begin is None else (encoder.begin,)
        self._template = _template(tokenizer) if chat else (begin, "", "", ())

    def ids(self, text: str) -> Tokens:
        """The tokens of a prompt with this text."""
        before, opening, closing, after = self._template
        return (*before, *self._encoder.pieces(f"{opening}{text}{closing}")[0], *after)

    def prompts(self, cases: Sequence[Case], room: int) -> list[DocumentPrompt]:
        """The prompts of cases on one document, of at most `room` tokens each.

        A document that is too long loses its end, the same part of it for every question.

        Raises:
            ClearheadError: as `check`.
        """
        self.check(cases, room)
        document = shown = cases[0].document
        whole = [self.ids(_text(case, shown)) for case in cases]
        longest = max(map(len, whole))
        if longest > room:
            starts = self._starts(document)
            kept = min(room - self._bare(cases), len(starts) - 1)
            while longest > room:
                shown = document[: starts[kept]].rstrip()
                whole = [self.ids(_text(case, shown)) for case in cases]
                longest = max(map(len, whole))
                # Words at the cut may come apart into more tokens than they were.
                kept = max(0, kept - max(1, longest - room))
        return [
            DocumentPrompt(case=case, prompt=prompt, document=shown, cut=shown != document)
            for case, prompt in zip(cases, _sharing(whole), strict=True)
        ]

    def check(self, cases: Sequence[Case], room: int) -> None:
        """Refuse room in which no token of a document would be left.

        Raises:
            ClearheadError: saying what prompts take.
        """
        if (bare := self._bare(cases)) >= room:
            raise ClearheadError(
                f"a prompt takes {bare} tokens without its document, and a length less what is to "
                f"be written leaves {max(0, room)} for both: give longer lengths, or write less"
            )

    def _bare(self, cases: Sequence[Case]) -> int:
        return max(len(self.ids(_text(case, ""))) for case in cases)

    def _starts(self, document: str) -> list[int]:
        """The place in the document at which each of its tokens starts."""
        made = self._tokenizer(
            document, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return [start for start, _ in made["offset_mapping"]]


def stop_of(case: Case) -> str:
    """The text that ends an answer or a summary of a model that only continues texts."""
    return _STOPS[case.kind]


def _text(case: Case, document: str) -> str:
    wording = _ANSWER if case.kind == "answer" else _QUESTION if case.question else _SUMMARY
    return wording.format(document=document, question=case.question)


def _sharing(whole: Sequence[Tokens]) -> list[Prompt]:
    """Prompts whose context is what all of them start with."""
    short = min(map(len, whole)) - 1
    alike = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*whole, strict=False))
    shared = min(short, sum(1 for _ in alike))
    return [Prompt(ids[:shared], ids[shared:]) for ids in whole]


def _template(tokenizer: Any) -> tuple[Tokens, str, str, Tokens]:
    """A chat template's tokens up to the last special one before what the user says, the texts
    around that, and its tokens from the next special one on."""
    if not getattr(tokenizer, "chat_template", None):
        raise ClearheadError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template: leave chat out"
        )
    marker = "What the user says."
    messages = [{"role": "user", "content": marker}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, found, after = text.rpartition(marker)
    if not found:
        raise ClearheadError(
            f"the chat template of {tokenizer.name_or_path} leaves out what the user says: leave "
            "chat out"
        )
    opens, closes = (
        tokenizer(part, add_special_tokens=False, return_offsets_mapping=True)
        for part in (before, after)
    )
    special = {*tokenizer.added_tokens_decoder}
    last = max((i + 1 for i, one in enumerate(opens["input_ids"]) if one in special), default=0)
    ids = closes["input_ids"]
    first = next((i for i, one in enumerate(ids) if one in special), len(ids))
    start = opens["offset_mapping"][last - 1][1] if last else 0
    stop = closes["offset_mapping"][first][0] if first < len(ids) else len(after)
    return tuple(opens["input_ids"][:last]), before[start:], after[:stop], tuple(ids[first:])


def digest_of(source: str) -> str:
    """The hash of a file's bytes; the revision of a data set of the hub, or the hash of its rows.

    Raises:
        ClearheadError: where there is no such file or data set.
    """
    return _from_hub(source)[0] if hub.is_hub(source) else file_digest(_local(source))


def _local(source: str) -> Path:
    """The .jsonl or .jsonl.gz file of a source."""
    path = Path(source)
    if not path.is_file() or ending(path) not in JSON_LINES:
        raise ClearheadError(
            f"{source!r}: no such file; give a .jsonl or .jsonl.gz file, or hf:NAME"
        )
    return path


@lru_cache(maxsize=8)
def _from_hub(source: str) -> tuple[str, list[tuple[str, Any]]]:
    """The digest and the rows of a data set, read once by a process."""
    revision = hub.pinned_revision(source, DataConfig().cache_folder, say)
    rows = list(hub.rows(source, revision))
    if revision is None:
        revision = hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()[:12]
    return revision, rows


def load_cases(source: str) -> list[Case]:
    """The cases of a source: a .jsonl or .jsonl.gz file, or `hf:NAME[:CONFIG][#SPLIT]`.

    Raises:
        ClearheadError: a file that cannot be read, a row without its fields, naming those and what
            it has, rows of several forms, or no row.
    """
    found: list[Case] = []
    known: _Form | None = None
    for where, row in _from_hub(source)[1] if hub.is_hub(source) else json_rows(_local(source)):
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
    if form.document == "source":
        value = " ".join(_texts(value, where, form.document))
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
    """The fields of every form, in words."""
    return " or ".join(", ".join(form.needs) for form in _FORMS)
