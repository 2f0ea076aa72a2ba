"""Chromium without a window: a page after its scripts, and what they say that they saw."""

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--allow-file-access-from-files", "--virtual-time-budget=30000"),
)

HOSTILE = (
    "</script><img src=x onerror=\"document.title='hacked'\"><b>b</b><a href='https://x'>a</a>"
)


def browse(chromium: str, folder: Path, url: str, *flags: str) -> str:
    """What Chromium prints of a page; its profile is in the folder."""
    command = [chromium, *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, url]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return done.stdout.decode("utf-8", errors="replace")


def seen(chromium: str, folder: Path, url: str, *flags: str) -> Any:
    """The JSON that a script on the page leaves in an element of the id "seen"."""
    dom = browse(chromium, folder, url, *flags, "--dump-dom")
    found = re.search(r'<pre id="seen">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None, "the page was never ready"
    return json.loads(html.unescape(found.group(1)))


# Opens page.html in a frame of a chosen width, waits until it is ready, uses it, says what it saw.
DRIVER = """<!doctype html>
<iframe src="page.html" style="width:WIDTHpx;height:900px"></iframe>
<script>
const frame = document.querySelector("iframe");
const timer = setInterval(async () => {
  const page = frame.contentDocument;
  if (!page || !page.documentElement.dataset.READY) return;
  clearInterval(timer);
  const seen = await use(page, frame.contentWindow).catch((error) => ({ error: String(error) }));
  const out = document.body.appendChild(document.createElement("pre"));
  out.id = "seen";
  out.textContent = JSON.stringify(seen);
}, 100);
const pause = (time) => new Promise((resolve) => setTimeout(resolve, time));
SCRIPT
</script>"""


def use(
    chromium: str, folder: Path, width: int, ready: str, script: str, *flags: str
) -> dict[str, Any]:
    """What the script's `async use(page, view)` returns of folder/page.html in a frame.

    `ready`: the name in the root's data set that tells when the page may be used.
    """
    driver = folder / "driver.html"
    text = DRIVER.replace("WIDTH", str(width)).replace("READY", ready).replace("SCRIPT", script)
    driver.write_text(text, encoding="utf-8")
    found: dict[str, Any] = seen(chromium, folder, driver.as_uri(), *flags)
    assert "error" not in found, found
    return found
