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
from clearhead.ranges import Count, Positive
from clearhead.terminal import say

TRIES, PAUSE = 3, 2.0  # requests for a verdict; seconds before the second, then twice that
PROMPT = """\
Below are a document, a summary as reference and a proposed summary. Decide whether everything that
the proposed summary says follows from the document. Go by the document alone, not by what else you
know. A text that differs from the reference may still be right, as long as nothing in it is wrong
or not in the document.

Document:\n{}\n\nReference:\n{}\n\nProposed text:\n{}

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
        """Refuse a judge without model or endpoint, a URL with a secret, and a key not set."""
        if self != JudgeConfig() and not (self.model and _URL.fullmatch(self.endpoint)):
            raise ClearheadError(
                "a judge needs a judge.model and a judge.endpoint, an http(s) URL without user and "
                "parameters: for example http://127.0.0.1:8000/v1"
            )
        if self.key_variable and not os.environ.get(self.key_variable, "").strip():
            raise ClearheadError(f"judge.key-variable: set ${self.key_variable} to the key")


def verdicts(config: JudgeConfig, prompts: Sequence[str]) -> dict[str, Any]:
    """`accuracy`, the share of supported texts among the decided, with its items; and the rest.

    A reply decides by a line of its own, "Conclusion: True" or "Conclusion: False", in any case and
    with any marks; with neither or both it is `undecided`. No reply in three requests is
    `unjudged`, which is counted and never an error; after three such texts in a row the server is
    asked no more.
    """
    from huggingface_hub import InferenceClient

    # Without a key the client would send the user's Hugging Face token.
    key = os.environ.get(config.key_variable, "").strip() or "none"
    client = InferenceClient(base_url=config.endpoint, api_key=key, timeout=config.timeout)
    settings: dict[str, Any] = {"model": config.model, "max_tokens": config.new_tokens}
    failures: dict[str, None] = {}

    def clean(words: str) -> str:  # a server may echo its key
        return words if key == "none" else words.replace(key, "[key]")

    def reply(prompt: str) -> str | None:
        for attempt in range(TRIES):
            time.sleep(PAUSE * attempt)
            try:
                message = {"role": "user", "content": prompt}
                answer = client.chat_completion([message], temperature=0, **settings)
                return clean(str(answer.choices[0].message.content or ""))
            except Exception as error:  # the client's, the network's: they share no base class
                words = f"{type(error).__name__}: {' '.join(str(error).split())}"
                failures[clean(words)[:200]] = None
        return None

    replies: list[str | None] = []
    for prompt in prompts:
        gone = len(replies) >= TRIES and not any(one is not None for one in replies[-TRIES:])
        replies.append(None if gone else reply(prompt))
    conclusions = [{one.lower() for one in _CONCLUSION.findall(one or "")} for one in replies]
    decided = [float("true" in one) for one in conclusions if len(one) == 1]
    if unjudged := replies.count(None):
        say(f"{unjudged} of {len(replies)} texts are unjudged: {'; '.join(failures)}")
    return {
        **({"accuracy": fmean(decided), "accuracy_by_item": decided} if decided else {}),
        "undecided": len(replies) - len(decided) - unjudged,
        "unjudged": unjudged,
        "judge_failures": [*failures],
        "replies": replies,
    }
