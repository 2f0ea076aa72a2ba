"""What a model is asked about a document: the prompt, with as much of the document as fits.

One text serves all models: instructions, the document, then the question, so that questions on one
document share what comes before them. A chat model may be asked in its own template, in which the
text is what the user says; neither it nor the document then yields a special token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.eval.cases import Case
from clearhead.eval.prefill import Prompt

Tokens = tuple[int, ...]

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
class Brief:
    """A prompt.

    Attributes:
        document: what of the document is in it. cut: whether that is less than all.
    """

    case: Case
    prompt: Prompt
    document: str
    cut: bool


class Frame:
    """How texts become prompts of one model.

    Args:
        tokenizer: a fast one. encode: a text's tokens, none of them special. begin: of a plain
            prompt. chat: whether the tokenizer's chat template is put around the text.

    Raises:
        ClearheadError: where there is no chat template.
    """

    def __init__(
        self, tokenizer: Any, encode: Callable[[str], Tokens], begin: Tokens, *, chat: bool
    ) -> None:
        self._tokenizer, self.encode, self.chat = tokenizer, encode, chat
        self._before, self._after = _template(tokenizer) if chat else (begin, ())

    def ids(self, text: str) -> Tokens:
        """The tokens of a prompt with this text."""
        return (*self._before, *self.encode(text), *self._after)

    def briefs(self, cases: Sequence[Case], room: int) -> list[Brief]:
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
            Brief(case=case, prompt=prompt, document=shown, cut=shown != document)
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
    """What ends an answer or a summary of a model that only continues texts."""
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


def _template(tokenizer: Any) -> tuple[Tokens, Tokens]:
    """The tokens that the chat template puts before and after what the user says."""
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
    made = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after)]
    return tuple(made[0]), tuple(made[1])
