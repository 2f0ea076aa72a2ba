"""Settings of a judge of texts, checked before anything is judged."""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from clearhead.errors import ClearheadError
from clearhead.metavars import Model, Url, Variable
from clearhead.ranges import Count, Positive, check


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """The model that judges texts; none unless it is named."""

    model: Model = ""
    """A folder or hub name; with an endpoint, the name by which it knows the model."""
    endpoint: Url = ""
    """Base URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1."""
    key_variable: Variable = ""
    """Environment variable with the endpoint's key; none is sent unless given, or kept at all."""
    new_tokens: Count = 512
    """Tokens of a verdict, its explanation included."""
    timeout: Positive = 120.0
    """Seconds that the endpoint may take over a reply."""
    tries: Count = 5
    """Requests before the endpoint counts as unreachable, with growing pauses between them."""
    trust_remote_code: bool = False
    """Run Python code that a judge loaded here brings. Read it first."""

    def check(self) -> None:
        """Refuse what could not work, before anything is written or judged."""
        check(self, "judge.")
        if not self.endpoint:
            for name, default in (("key_variable", ""), ("timeout", 120.0), ("tries", 5)):
                if getattr(self, name) != default:
                    raise ClearheadError(
                        f"judge.{name.replace('_', '-')} has no effect without judge.endpoint: "
                        "leave it out"
                    )
            if self.model:
                from clearhead.models.loading import (  # torch, which options need not
                    kind_of,
                    resolved,
                )

                kind_of(resolved(self.model), trust_remote_code=self.trust_remote_code)
            elif self.new_tokens != JudgeConfig().new_tokens:
                raise ClearheadError("judge.new-tokens has no effect without judge.model")
            return
        if self.trust_remote_code:
            raise ClearheadError("judge.trust-remote-code has no effect with judge.endpoint")
        if not self.model:
            raise ClearheadError(
                "judge.endpoint needs the name of a model there: for example --hallucination."
                "judge.model gpt-4o"
            )
        try:
            parts = urlsplit(self.endpoint)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            good = False
        sendable = self.endpoint.isascii() and self.endpoint.isprintable()
        if not good or not sendable or " " in self.endpoint:
            raise ClearheadError(
                f"judge.endpoint {self.endpoint!r} is no http(s) URL in ASCII: for example "
                "http://127.0.0.1:8000/v1"
            )
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ClearheadError(
                "judge.endpoint is kept in the records: give it without user, password and "
                "parameters, and the key by --hallucination.judge.key-variable"
            )
        if self.key_variable and not (self.key.isascii() and self.key.isprintable() and self.key):
            raise ClearheadError(
                f"the environment variable {self.key_variable} (judge.key-variable) holds no key: "
                "set it to the endpoint's"
            )

    @property
    def key(self) -> str:
        """The endpoint's key; empty where none is asked for."""
        return os.environ.get(self.key_variable, "").strip() if self.key_variable else ""

    @property
    def name(self) -> str:
        """Its name in tables."""
        return Path(self.model).name if Path(self.model).is_dir() else self.model
