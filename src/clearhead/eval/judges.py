"""Judges of texts written on documents: a model behind an endpoint, or one loaded here.

After Lookback Lens (arXiv 2407.07071, appendix B), which the Differential Transformer follows
(2410.05258, section 3.6): the judge reads the document, a reference and the text, explains, and
concludes. The wording is our own. A conclusion is read strictly: a reply without one is undecided.
"""

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from clearhead.data.tokenizer import Encoder
from clearhead.errors import ClearheadError
from clearhead.eval.answers import Reader, ends_of
from clearhead.eval.document_prompts import Case, PromptTemplate
from clearhead.eval.judge_config import JudgeConfig
from clearhead.eval.prefill import Prompt
from clearhead.measure.task import weights_digest
from clearhead.models.inspection import longest_text
from clearhead.models.loading import load

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds; each pause is twice the last
_AGAIN = (408, 409, 429)  # and 5xx: what may pass by itself
_REFUSED = (401, 403)
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
    """The text of a judge's reply, and the model that wrote it."""

    text: str
    model: str


class Judge(Protocol):
    """Answers prompts.

    Attributes:
        identity: a part of the cache key of its replies.
    """

    identity: str

    def check(self) -> None:
        """Refuse a judge that plainly cannot answer."""

    def replies(self, prompts: Sequence[str]) -> Iterator[tuple[int, Reply]]:
        """Replies by the prompt's number, in any order, each as soon as it is there."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: urllib would send the key along."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


class _StatusError(Exception):
    """An HTTP status that is no success, the server's words, and the pause it asks for."""

    def __init__(self, code: int, said: str, pause: float | None) -> None:
        self.code, self.said, self.pause = code, said, pause


class RemoteJudge:
    """A model behind an OpenAI-compatible endpoint, asked at temperature 0.

    Not by huggingface_hub's InferenceClient: it sends the user's Hugging Face token where no key is
    given, follows redirects, and reaches no server, even on this machine, under HF_HUB_OFFLINE.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config, self._key, self._url = config, config.key, config.endpoint.rstrip("/")
        self._opener = urllib.request.build_opener(_NoRedirect)
        self.identity = f"{config.endpoint} {config.model} {config.new_tokens}"

    def check(self) -> None:
        """Refuse a server that is not reached or does not take the key, by its list of models.

        Not every server has such a list: any other answer shows that it is there.

        Raises:
            ClearheadError: naming the server.
        """
        try:
            self._ask("models", None)
        except _StatusError as status:
            if status.code in _REFUSED:
                raise self._refusal(status) from status

    def replies(self, prompts: Sequence[str]) -> Iterator[tuple[int, Reply]]:
        """Replies as `Judge` has them; one without text is "".

        Raises:
            ClearheadError: a server that is not reached in all tries, refuses, or answers otherwise
                than chat completions do.
        """
        for number, prompt in enumerate(prompts):
            request = {
                "model": self._config.model,
                "messages": [{"role": "user", "content": prompt}],
                "temperature": 0,
                "max_tokens": self._config.new_tokens,
            }
            try:
                answer = self._ask("chat/completions", request)
            except _StatusError as status:
                raise self._refusal(status) from status
            try:
                text = answer["choices"][0]["message"]["content"]
            except (KeyError, IndexError, TypeError):
                raise ClearheadError(
                    f"judge {self._url} answers {_line(answer)!r}, which is no chat completion: "
                    "give the base URL of an OpenAI-compatible server, which mostly ends in /v1"
                ) from None
            yield (
                number,
                Reply(
                    text=text if isinstance(text, str) else "",
                    model=str(answer.get("model") or self._config.model),
                ),
            )

    def _ask(self, path: str, request: dict[str, Any] | None) -> Any:
        """The body of a good answer; a GET where there is no request to send.

        A lost connection is tried again, and so is a POST after a status that may pass.
        """
        reason, pause, tries = "", FIRST_PAUSE, self._config.tries
        for attempt in range(tries):
            if attempt:
                time.sleep(min(pause, LONGEST_PAUSE))
                pause *= 2
            try:
                return self._send(path, request)
            except _StatusError as status:
                if request is None or (status.code not in _AGAIN and status.code < 500):
                    raise
                reason = f"answers {status.code} ({status.said})"
                pause = status.pause or pause
            except (OSError, http.client.HTTPException) as error:
                cause = getattr(error, "reason", error)
                said = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
                reason = f"cannot be reached ({_line(self._redacted(said))})"
        times = "once" if tries == 1 else f"{tries} times"
        raise ClearheadError(f"judge {self._url} {reason}, tried {times}: see that it runs")

    def _send(self, path: str, request: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json", "User-Agent": "clearhead"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if request is None else json.dumps(request).encode()
        asked = urllib.request.Request(f"{self._url}/{path}", data=data, headers=headers)
        try:
            with self._opener.open(asked, timeout=self._config.timeout) as answer:
                return self._parsed(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                body = self._parsed(error.read(65_536))
            after = error.headers.get("Retry-After", "")
            raise _StatusError(
                error.code,
                _line(_message(body) or str(error.reason)),
                float(after) if after.isdecimal() else None,
            ) from None

    def _refusal(self, status: _StatusError) -> ClearheadError:
        advice = "check the endpoint and the model's name"
        if status.code in _REFUSED:
            advice = "name the variable that holds a good key: --hallucination.judge.key-variable"
        elif 300 <= status.code < 400:
            advice = "redirects are not followed: give the URL itself"
        return ClearheadError(f"judge {self._url} answers {status.code} ({status.said}): {advice}")

    def _parsed(self, body: bytes) -> Any:
        """The JSON of a body, or its text where it is none, without the key."""
        text = body.decode("utf-8", "replace")
        try:
            return self._redacted(json.loads(text))
        except (ValueError, RecursionError):
            return self._redacted(text)

    def _redacted(self, answer: Any) -> Any:
        """JSON or text without the key: a server may echo its own request."""
        if isinstance(answer, str):
            return answer.replace(self._key, "[key]") if self._key else answer
        if isinstance(answer, list):
            return [self._redacted(one) for one in answer]
        if isinstance(answer, dict):
            return {self._redacted(name): self._redacted(value) for name, value in answer.items()}
        return answer


def _message(body: Any) -> Any:
    """The message of an error's body: OpenAI's {"error": {"message": …}}, or all of it."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return error.get("message", body) if isinstance(error, dict) else error


def _line(answer: Any) -> str:
    """A server's words as a part of a line."""
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return " ".join(text.split())[:200]


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
        self._template = PromptTemplate(
            tokenizer, Encoder(tokenizer), chat=bool(tokenizer.chat_template)
        )
        self.identity = f"{weights_digest(model)} {model.dtype} {config.new_tokens}"

    def check(self) -> None:
        """It is loaded."""

    def replies(self, prompts: Sequence[str]) -> Iterator[tuple[int, Reply]]:
        whole = [self._template.ids(prompt) for prompt in prompts]
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
    """The judge's prompt about a text that was written on `document`."""
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
