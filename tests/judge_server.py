"""A judge on loopback: an OpenAI-compatible server in a thread, that answers as it is told."""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Answer = tuple[int, Any, dict[str, str]]  # status, body, headers


def completion(text: Any, model: str = "judge-2026") -> Answer:
    """A chat completion with this text."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return 200, {"object": "chat.completion", "model": model, "choices": [choice]}, {}


class JudgeServer:
    """Serves `answer(prompt)` and `models` until `close`; keeps (path, headers, body) of requests.

    An exception in `answer` cuts the connection.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.answer: Callable[[str], Answer] = lambda prompt: completion("Conclusion: True")
        self.models: Answer = (200, {"object": "list", "data": []}, {})
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.requests.append((self.path, dict(self.headers), None))
                self._send(*server.models)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append((self.path, dict(self.headers), body))
                try:
                    answer = server.answer(body["messages"][0]["content"])
                except ConnectionError:
                    self.connection.close()
                    return
                self._send(*answer)

            def _send(self, status: int, body: Any, headers: dict[str, str]) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        """The base that a judge is given."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def prompts(self) -> list[str]:
        """What was asked."""
        return [body["messages"][0]["content"] for _, _, body in self.requests if body]

    def close(self) -> None:
        """Stop, and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
