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
