"""The live page answers its own address alone."""

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from clearhead.errors import ClearheadError
from clearhead.view import Observation, observe_text
from clearhead.view.live import LONGEST, LiveServer


@pytest.fixture
def server(make: Any, tokenizer: Any, words: str) -> Iterator[LiveServer]:
    model = make("Llama")

    def observe(text: str) -> list[Observation]:
        return [observe_text(model, tokenizer, text, name="tiny")]

    with LiveServer(observe, title="tiny", text=words) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _ask(server: LiveServer, method: str, path: str, body: str = "", **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, body.encode() if method == "POST" else None, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, text


def test_it_listens_on_loopback_alone(server: LiveServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/{server.secret}/"
    assert len(server.secret) >= 32


def test_the_page_and_another_text(server: LiveServer) -> None:
    own = f"http://127.0.0.1:{server.server_port}"
    status, headers, page = _ask(server, "GET", f"/{server.secret}/")
    assert status == 200
    assert '<textarea id="typed"' in page
    assert "connect-src 'self'" in page.replace("&#39;", "'")
    assert headers["Referrer-Policy"] == "no-referrer"
    path = f"/{server.secret}/observe"
    status, _, answer = _ask(server, "POST", path, "the hat sat", Origin=own)
    assert status == 200
    (model,) = json.loads(answer)["models"]
    assert "".join(model["tokens"][1:]) == "the hat sat"
    status, _, answer = _ask(server, "POST", path, "", Origin=own)
    assert (status, answer) == (400, "the text is 1 token for tiny: give at least 2")


def test_a_wrong_secret_host_or_origin_is_refused(server: LiveServer) -> None:
    port = server.server_port
    own, good = f"http://127.0.0.1:{port}", f"/{server.secret}/"
    for path in ("/", "/x/", good[:-2] + "/", f"/{server.secret}", good + "observe", "/%C3%A9/"):
        assert _ask(server, "GET", path)[0] == 403, path
    assert _ask(server, "GET", good, Host=f"evil.example:{port}")[0] == 403
    assert _ask(server, "GET", good, Host=f"localhost:{port}")[0] == 403
    assert _ask(server, "POST", good + "observe", "a cat")[0] == 403  # no Origin
    for origin in ("http://evil.example", "null", f"http://localhost:{port}", own + "/"):
        assert _ask(server, "POST", good + "observe", "a cat", Origin=origin)[0] == 403
    assert _ask(server, "POST", "/x/observe", "a cat", Origin=own)[0] == 403
    for method in ("PUT", "OPTIONS", "DELETE"):
        assert _ask(server, method, good, Origin=own)[0] == 501
    headers = {"Origin": own, "Content-Length": str(LONGEST + 1)}
    assert _ask(server, "POST", good + "observe", "a cat", **headers)[0] == 413


def test_a_port_in_use_is_refused_in_one_line(server: LiveServer) -> None:
    with pytest.raises(ClearheadError, match="leave --port out for a free one"):
        LiveServer(lambda text: [], title="x", text="x", port=server.server_port)
