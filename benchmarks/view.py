"""First paint and click times of the viewer's page, in headless Chromium."""

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.race import Ratio
from clearhead.data.tokenizer import train
from clearhead.errors import ClearheadError
from clearhead.view import observe_text, render

LENGTH = 256  # tokens
CLICKS = 12
AIMS = {"first paint": 0.3, "click on a head": 0.05, "click on a token": 0.05}
# Loads the page in a frame ROUNDS times; times run from a load's start, or a click's, to the frame
# after what it drew.
_DRIVER = """<!doctype html><iframe style="width:1400px;height:1000px"></iframe><script>
const frame = document.querySelector("iframe");
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
(async () => {
  const found = { "first paint": [], "click on a head": [], "click on a token": [] };
  for (let round = 0; round < ROUNDS; round++) {
    frame.src = "/page?" + round;
    await new Promise((resolve) => (frame.onload = resolve));
    const view = frame.contentWindow, page = view.document, { dataset } = page.documentElement;
    while (!dataset.ready) await pause(10);
    found["first paint"].push(dataset.painted / 1000);
    await pause(200);
    const timed = async (name, click) => {
      delete dataset.redraw;
      const began = performance.now();
      click();
      do await new Promise((resolve) => view.requestAnimationFrame(() => setTimeout(resolve)));
      while (!dataset.redraw);
      found[name].push((performance.now() - began) / 1000);
      await pause(20);
    };
    const grid = page.querySelector(".grid"), tokens = page.querySelectorAll(".token");
    for (let i = 0; i < CLICKS; i++) {
      await timed("click on a head", () => {
        const { left, top, width } = grid.getBoundingClientRect(), cell = (width - 24) / 30;
        const place = { clientX: left + 24 + cell * (((i * 7) % 30) + 0.5), clientY: top + 30 };
        grid.dispatchEvent(new view.MouseEvent("click", place));
      });
      await timed("click on a token", () => tokens[(i * 31) % tokens.length].dispatchEvent(
        new view.MouseEvent("click", { bubbles: true })));
    }
  }
  await fetch("/found", { method: "POST", body: JSON.stringify(found) });
})();
</script>"""


def view(rounds: int) -> Iterator[Ratio]:
    """Seconds to the first paint of a page of 30 layers × 9 heads × 256 tokens, and from a click
    to its frame, the least of all rounds, against the aims of `AIMS`."""
    found = _in_chromium(_page(), rounds)
    for name, bound in AIMS.items():
        yield Ratio(
            name="view",
            ours=f"{name}, seconds",
            peer="1 s",
            ratio=min(found[name]),
            bound=bound,
            seconds={name: found[name]},
        )


def _page() -> str:
    words = "the keys to the cabinet that the carpenter made are on the table in the hall "
    tokenizer = train([words], 300)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=64,
        vocab_size=300,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).eval()
    found = observe_text(model, tokenizer, words * 30, name="30 layers", longest=LENGTH)
    return render([found], title="30 layers")


def _in_chromium(page: str, rounds: int) -> dict[str, list[float]]:
    chromium = os.environ.get("CLEARHEAD_CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        raise ClearheadError("no Chromium on the path: install it, or set CLEARHEAD_CHROMIUM")
    driver = _DRIVER.replace("ROUNDS", str(rounds)).replace("CLICKS", str(CLICKS))
    found: dict[str, list[float]] = {}
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer((page if self.path.startswith("/page") else driver).encode())

        def do_POST(self) -> None:
            found.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._answer(b"")
            done.set()

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run")
        url = f"http://127.0.0.1:{server.server_port}/"
        browser = subprocess.Popen(
            # A port for debugging keeps a headless browser open.
            [chromium, *flags, f"--user-data-dir={profile}", "--remote-debugging-port=0", url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            if not done.wait(60 + 20 * rounds):
                raise ClearheadError("Chromium did not show the page in time")
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
    return found
