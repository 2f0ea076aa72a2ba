"""An OpenAI-compatible endpoint: chat completions over HTTP, with retries."""

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

from clearhead.errors import ClearheadError

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds; each pause is twice the last
_AGAIN = (408, 409, 429)  # and 5xx: what may pass by itself
_REFUSED = (401, 403)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib would take the key along to wherever it is sent."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


class _StatusError(Exception):
    def __init__(self, code: int, said: str, pause: float | None) -> None:
        self.code, self.said, self.pause = code, said, pause


class Endpoint:
    """Talks to one server.

    Args:
        url: its base, such as http://127.0.0.1:8000/v1. key: sent as a bearer token, if any, and
            never shown. timeout: in seconds, of a request. tries: requests before giving up.
    """

    def __init__(self, url: str, *, key: str, timeout: float, tries: int) -> None:
        self._url, self._key = url.rstrip("/"), key
        self._timeout, self._tries = timeout, tries
        self._opener = urllib.request.build_opener(_NoRedirect)

    def check(self) -> None:
        """Find out whether the server is there and takes the key, by its list of models.

        Not every server has such a list: any other answer says that it is there.

        Raises:
            ClearheadError: where it is not, or does not.
        """
        try:
            self._ask("models", None, patient=False)
        except _StatusError as status:
            if status.code in _REFUSED:
                raise self._refused(status) from status

    def complete(self, prompt: str, *, model: str, new_tokens: int) -> tuple[str, str]:
        """The reply to one message at temperature 0, and the model that the server says it is of.

        A reply without text is "".

        Raises:
            ClearheadError: a server that is not reached in all tries, refuses, or answers otherwise
                than chat completions do.
        """
        request = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": new_tokens,
        }
        try:
            answer = self._ask("chat/completions", request, patient=True)
        except _StatusError as status:
            raise self._refused(status) from status
        found = self._redacted(_parsed(answer))
        try:
            text = found["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            said = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
            raise ClearheadError(
                f"judge {self._url} answers {self._clean(said)!r}, "
                "which is no chat completion: give the base URL of an OpenAI-compatible server, "
                "which mostly ends in /v1"
            ) from None
        return text if isinstance(text, str) else "", str(found.get("model") or model)

    def _ask(self, path: str, request: dict[str, Any] | None, *, patient: bool) -> bytes:
        """The body of a good answer; a GET where there is no request to send.

        A lost connection is always tried again, a status that may pass if `patient`.
        """
        reason, pause = "", FIRST_PAUSE
        for attempt in range(self._tries):
            if attempt:
                time.sleep(min(pause, LONGEST_PAUSE))
                pause *= 2
            try:
                return self._send(path, request)
            except _StatusError as status:
                if not patient or (status.code not in _AGAIN and status.code < 500):
                    raise
                reason = f"answers {status.code} ({status.said})"
                pause = status.pause or pause
            except (OSError, http.client.HTTPException) as error:
                cause = getattr(error, "reason", error)
                said = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
                reason = f"cannot be reached ({self._clean(said)})"
        times = "once" if self._tries == 1 else f"{self._tries} times"
        raise ClearheadError(f"judge {self._url} {reason}, tried {times}: see that it runs")

    def _send(self, path: str, request: dict[str, Any] | None) -> bytes:
        headers = {"Content-Type": "application/json", "User-Agent": "clearhead"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if request is None else json.dumps(request).encode()
        asked = urllib.request.Request(f"{self._url}/{path}", data=data, headers=headers)
        try:
            with self._opener.open(asked, timeout=self._timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            with error:
                said = _message(error.read(65_536)) or str(error.reason)
            after = error.headers.get("Retry-After", "")
            raise _StatusError(
                error.code, self._clean(said), float(after) if after.isdecimal() else None
            ) from None

    def _refused(self, status: _StatusError) -> ClearheadError:
        advice = "check the endpoint and the model's name"
        if status.code in _REFUSED:
            advice = "name the variable that holds a good key: --hallucination.judge.key-variable"
        elif 300 <= status.code < 400:
            advice = "redirects are not followed: give the URL itself"
        return ClearheadError(f"judge {self._url} answers {status.code} ({status.said}): {advice}")

    def _clean(self, text: str) -> str:
        """A server's words as a part of a line, without the key."""
        return " ".join(self._redacted(text).split())[:200]

    def _redacted(self, said: Any) -> Any:
        """What a server said, JSON or text, without the key: it may echo its own request."""
        if isinstance(said, str):
            return said.replace(self._key, "[key]") if self._key else said
        if isinstance(said, list):
            return [self._redacted(one) for one in said]
        if isinstance(said, dict):
            return {self._redacted(name): self._redacted(value) for name, value in said.items()}
        return said


def _parsed(body: bytes) -> Any:
    """The JSON of a body, or its text where it is none."""
    text = body.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text


def _message(body: bytes) -> str:
    """What an error's body says: OpenAI's {"error": {"message": …}}, or plain text."""
    found = _parsed(body)
    try:
        error = found["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (KeyError, TypeError):
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
