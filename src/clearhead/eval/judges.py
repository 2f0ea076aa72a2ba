"""A model that says whether a text holds to its document: behind an endpoint, or loaded here.

After Lookback Lens (arXiv 2407.07071, appendix B), which the Differential Transformer follows
(2410.05258, section 3.6): the judge reads the document, a reference and the text, explains, and
concludes. The wording is our own, and a conclusion is read strictly: what gives none is undecided.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from clearhead.data.tokenizer import Encoder
from clearhead.errors import ClearheadError
from clearhead.eval.answers import Reader, ends_of
from clearhead.eval.briefs import Frame
from clearhead.eval.cases import Case
from clearhead.eval.endpoint import Endpoint
from clearhead.eval.fingerprints import weights_digest
from clearhead.eval.judge_config import JudgeConfig
from clearhead.eval.prefill import Prompt
from clearhead.models.inspection import longest_text
from clearhead.models.loading import load

_MARKS = r"(?:[^\w\n]|_)*"
_CONCLUSION = re.compile(
    rf"^{_MARKS}conclusion{_MARKS}:{_MARKS}(true|false){_MARKS}$", re.MULTILINE | re.IGNORECASE
)
_PROMPT = """\
Below are a document{and_question}, and a proposed {thing}. Decide whether everything that the \
proposed {thing} says follows from the document. Go by the document alone, not by what else you \
know. A {thing} that differs from the reference may still be right, as long as nothing in it is \
wrong or missing from the document.

Document:
{document}

{question}Reference:
{references}

Proposed {thing}:
{text}

First explain in a few sentences. Then write a last line, which is "Conclusion: True" if the \
document supports all of the proposed {thing}, or "Conclusion: False" if any of it is wrong or not \
in the document.
"""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a judge wrote, and as which model it answered."""

    text: str
    model: str


class Judge(Protocol):
    """Answers prompts.

    Attributes:
        identity: tells it from other judges, wherever their replies are kept together.
    """

    identity: str

    def check(self) -> None:
        """Raise a ClearheadError where it plainly cannot answer."""

    def replies(self, prompts: Sequence[str]) -> Iterator[tuple[int, Reply]]:
        """Replies to one prompt or more by number, in any order, each as soon as it is there."""


class RemoteJudge:
    """A model behind an OpenAI-compatible endpoint, asked at temperature 0."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._endpoint = Endpoint(
            config.endpoint,
            key=config.key,
            timeout=config.timeout,
            tries=config.tries,
        )
        self.identity = f"{config.endpoint} {config.model} {config.new_tokens}"

    def check(self) -> None:
        self._endpoint.check()

    def replies(self, prompts: Sequence[str]) -> Iterator[tuple[int, Reply]]:
        for number, prompt in enumerate(prompts):
            text, model = self._endpoint.complete(
                prompt, model=self._config.model, new_tokens=self._config.new_tokens
            )
            yield number, Reply(text=text, model=model)


class LocalJudge:
    """A causal language model of transformers, decoding greedily, in its chat template if any.

    Args:
        device: of the model. batch_tokens: of prompts run together.

    Raises:
        ClearheadError: where the model does not load.
    """

    def __init__(self, config: JudgeConfig, *, device: Any, batch_tokens: int) -> None:
        self._config = config
        model, tokenizer = load(config.model, trust_remote_code=config.trust_remote_code)
        self._model, self._tokenizer = model.to(device), tokenizer
        self._reader = Reader(model, batch_tokens=batch_tokens, ends=ends_of(model, tokenizer))
        encoder = Encoder(tokenizer)
        self._frame = Frame(
            tokenizer,
            lambda text: tuple(encoder.encode([text])[0].tolist()),
            () if encoder.begin is None else (encoder.begin,),
            chat=bool(tokenizer.chat_template),
        )
        self.identity = f"{weights_digest(model)} {model.dtype} {config.new_tokens}"

    def check(self) -> None:
        """It is loaded."""

    def replies(self, prompts: Sequence[str]) -> Iterator[tuple[int, Reply]]:
        whole = [self._frame.ids(prompt) for prompt in prompts]
        limit = getattr(self._model.config, "max_position_embeddings", None) or longest_text(
            self._model
        )
        longest = max(map(len, whole)) + self._config.new_tokens
        if limit is not None and longest > limit:
            raise ClearheadError(
                f"the judge {self._config.name} reads {limit:,} tokens, and {longest:,} are asked "
                "of it with its verdict: give shorter lengths, a smaller "
                "--hallucination.judge.new-tokens, or another judge"
            )
        asked = [Prompt(ids[:-1], ids[-1:]) for ids in whole]
        for found in self._reader.each(
            asked, [()] * len(asked), new_tokens=self._config.new_tokens
        ):
            for number, answer in found.items():
                text = self._tokenizer.decode(list(answer.written), skip_special_tokens=True)
                yield number, Reply(text=text, model=self._config.name)


def question_to(case: Case, document: str, text: str) -> str:
    """What a judge is asked about a text that was written on `document`."""
    return _PROMPT.format(
        and_question=" and a question on it" if case.question else "",
        thing=case.kind,
        document=document,
        question=f"Question:\n{case.question}\n\n" if case.question else "",
        references="\n".join(case.references),
        text=text,
    )


def conclusion(reply: str) -> bool | None:
    """The verdict: True where the text is supported; None where there is none, or there are two.

    It is a line of its own, "Conclusion: True" or "Conclusion: False", in any case and with any
    marks around its words.
    """
    found = {match[1].lower() for match in _CONCLUSION.finditer(reply)}
    return None if len(found) != 1 else found == {"true"}
