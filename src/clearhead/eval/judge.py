"""A judge of texts written on documents: any OpenAI-compatible server, by huggingface_hub's client.

After Lookback Lens (arXiv 2407.07071, appendix B), as in the Differential Transformer (2410.05258,
section 3.6); the wording is our own.
"""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.metavars import Model, Url, Variable
from clearhead.ranges import Count, Positive, check
from clearhead.terminal import say

TRIES, PAUSE = 3, 2.0  # requests for a verdict; seconds before the second, then twice that
PROMPT = """\
Below are a document, a task and a proposed text. Decide whether everything that the text says
follows from the document. Go by the document alone, not by what else you know. A text that differs
from the reference may still be right, as long as nothing in it is wrong or not in the document.

Document:\n{}\n\nTask: {}\n\nReference:\n{}\n\nProposed text:\n{}

First explain in a few sentences. Then write a last line, which is "Conclusion: True" if the
document supports all of the proposed text, or "Conclusion: False" if any of it is not in there.
"""
_URL = re.compile(r"https?://[^@?#\s]+")
_MARKS = r"(?:[^\w\n]|_)*"
_CONCLUSION = re.compile(rf"(?im)^{_MARKS}conclusion{_MARKS}:{_MARKS}(true|false){_MARKS}$")


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """The model that judges texts; none unless it is named."""

    endpoint: Url = ""
    """Base URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1."""
    model: Model = ""
    """Name by which the server knows the model."""
    key_variable: Variable = ""
    """Environment variable with the server's key; none is sent unless given."""
    new_tokens: Count = 512
    """Tokens of a verdict, its explanation included."""
    timeout: Positive = 120.0
    """Seconds that the server may take over a reply."""

    def check(self) -> None:
        """Refuse half a judge, a URL that shows a secret in records, and a key that is not set."""
        check(self, "judge.")
        if self != JudgeConfig() and not (self.model and _URL.fullmatch(self.endpoint)):
            raise ClearheadError(
                "a judge needs a judge.model and a judge.endpoint, an http(s) URL without user and "
                "parameters: for example http://127.0.0.1:8000/v1"
            )
        if self.key_variable and not os.environ.get(self.key_variable, "").strip():
            raise ClearheadError(f"judge.key-variable: set ${self.key_variable} to the key")


class Judge:
    """Asks a server. One that fails is counted and named, never an error."""

    def __init__(self, config: JudgeConfig) -> None:
        from huggingface_hub import InferenceClient

        # Without a key the client would send the user's Hugging Face token.
        self._key = os.environ.get(config.key_variable, "").strip() or "none"
        self._client = InferenceClient(
            base_url=config.endpoint, api_key=self._key, timeout=config.timeout
        )
        self._asked: dict[str, Any] = {"model": config.model, "max_tokens": config.new_tokens}
        self._lost, self._names, self._failures = 0, set[str](), set[str]()

    def verdicts(self, prompts: Sequence[str]) -> dict[str, Any]:
        """`accuracy`, the share of supported texts among the decided, with its items; and the rest.

        A reply decides by a line of its own, "Conclusion: True" or "Conclusion: False", in any case
        and with any marks; with neither or both it is `undecided`. No reply is `unjudged`.
        """
        replies = list(map(self._reply, prompts))
        said = [{one.lower() for one in _CONCLUSION.findall(reply or "")} for reply in replies]
        decided = [float("true" in one) for one in said if len(one) == 1]
        if unjudged := replies.count(None):
            say(f"{unjudged} of {len(replies)} texts are unjudged: {'; '.join(self._failures)}")
        return {
            **({"accuracy": fmean(decided), "accuracy_by_item": decided} if decided else {}),
            "undecided": len(replies) - len(decided) - unjudged,
            "unjudged": unjudged,
            "judged_by": sorted(self._names),
            "judge_failures": sorted(self._failures),
            "replies": replies,
        }

    def _reply(self, prompt: str) -> str | None:
        """None where there is none; after three such in a row the server is asked no more."""
        for attempt in range(TRIES if self._lost < TRIES else 0):
            time.sleep(PAUSE * attempt)
            try:
                message = {"role": "user", "content": prompt}
                answer = self._client.chat_completion([message], temperature=0, **self._asked)
                content = answer.choices[0].message.content
            except Exception as error:  # the client's, the network's: they share no base class
                words = self._clean(f"{type(error).__name__}: {' '.join(str(error).split())}")
                self._failures.add(words[:200])
                continue
            self._lost = 0
            self._names.add(self._clean(answer.model))
            return self._clean(content) if isinstance(content, str) else ""
        self._lost += 1
        return None

    def _clean(self, words: Any) -> str:  # a server may echo its key
        return str(words).replace(self._key, "[key]") if self._key != "none" else str(words)
