"""The viewer's page with a box to type in, served to this machine alone.

The server listens on 127.0.0.1. A request needs the secret in its path, which is new each time,
and the server's own address as its Host; one that runs a model needs it as its Origin, too. So no
page of another site can ask, and no name that resolves to this address.
"""

import json
import secrets
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

from clearhead.errors import ClearheadError
from clearhead.view.observation import Observation
from clearhead.view.page import payload, render

LOOPBACK = "127.0.0.1"
LONGEST = 1 << 18  # bytes of a text


class LiveServer(ThreadingHTTPServer):
    """A server of one page.

    Args:
        observe: a text to one observation a model; raises a ClearheadError for a text that it
            cannot read. It is called by one request at a time.
        title: of the page.
        text: that is read to begin with.
        port: 0 is any that is free.
    """

    daemon_threads = True

    def __init__(
        self,
        observe: Callable[[str], Sequence[Observation]],
        *,
        title: str,
        text: str,
        port: int = 0,
    ) -> None:
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise ClearheadError(
                f"cannot listen on port {port} ({error.strerror}): leave --port out for a free one"
            ) from error
        self.observe, self.turn = observe, Lock()
        self.secret = secrets.token_urlsafe(24)
        self.host = f"{LOOPBACK}:{self.server_port}"
        page = render(observe(text), title=title, text=text, live=True)
        self.page = page.encode("utf-8", "backslashreplace")

    @property
    def url(self) -> str:
        """The page's address, with its secret."""
        return f"http://{self.host}/{self.secret}/"


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = 30  # seconds that a request may take to arrive
    server_version, sys_version = "clearhead", ""

    def do_GET(self) -> None:
        if self._known("") and self._is_own("Host", self.server.host):
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)

    def do_POST(self) -> None:
        own = f"http://{self.server.host}"
        if not (
            self._known("observe")
            and self._is_own("Host", self.server.host)
            and self._is_own("Origin", own)
        ):
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LONGEST:
            self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"give a text of at most {LONGEST:,} bytes"
            )
            return
        text = self.rfile.read(int(length)).decode("utf-8", errors="replace")
        try:
            with self.server.turn:
                found = payload(self.server.observe(text))
        except ClearheadError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        answer = json.dumps(found, allow_nan=False, separators=(",", ":"))
        self._answer(HTTPStatus.OK, "application/json", answer.encode())

    def _known(self, page: str) -> bool:
        """True for the secret path of `page`; otherwise the request is refused."""
        expected = f"/{self.server.secret}/{page}"
        if secrets.compare_digest(self.path.encode(), expected.encode()):
            return True
        self._refuse(HTTPStatus.FORBIDDEN, "use the address that clearhead view printed")
        return False

    def _is_own(self, header: str, wanted: str) -> bool:
        if self.headers.get(header) == wanted:
            return True
        self._refuse(HTTPStatus.FORBIDDEN, f"this page answers {wanted} alone")
        return False

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        self.close_connection = True
        self._answer(status, "text/plain; charset=utf-8", words.encode())

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: a log line would show the secret."""
