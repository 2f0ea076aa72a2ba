"""The page in a real browser: it draws, it is quiet, it fits, and nothing hostile runs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests_chromium import HOSTILE, browse, use

from clearhead.records.files import write_text
from clearhead.records.loading import parse
from clearhead.report import load, page_of, render

from .test_diagnosis import encode, records_of
from .test_quantization import lines

pytestmark = pytest.mark.browser
Fake = Callable[..., Path]
USE = """
async function use(page, view) {
  const early = Number(page.documentElement.dataset.drawn);
  for (const fold of page.querySelectorAll("details")) fold.open = true;
  for (let i = 0; i < 40; i++) {
    await pause(500);
    if (Number(page.documentElement.dataset.drawn) === page.querySelectorAll(".plot").length) break;
  }
  const seen = {
    early,
    drawn: Number(page.documentElement.dataset.drawn),
    plots: page.querySelectorAll(".plot").length,
    filled: [...page.querySelectorAll(".plot")].filter(
      (plot) => plot.querySelector("svg.main-svg .trace, svg.main-svg .hm image")).length,
    width: page.documentElement.scrollWidth,
    height: page.documentElement.scrollHeight,
    window: page.documentElement.clientWidth,
  };
  frame.style.width = "700px";
  view.dispatchEvent(new view.Event("resize")); // which virtual time does not send by itself
  for (let i = 0; i < 4; i++) await pause(500);
  seen.misfits = [...page.querySelectorAll(".plot")].filter((plot) =>
    Math.abs(plot.querySelector("svg.main-svg").clientWidth - plot.clientWidth) > 1).length;
  seen.links = page.querySelectorAll("a").length;
  seen.images = page.querySelectorAll("img").length;
  seen.bold = page.querySelectorAll("svg [style*='font-weight: bold']").length;
  seen.title = page.title;
  seen.errors = page.documentElement.dataset.errors ?? "";
  return seen;
}
"""


def write(fake: Fake, folder: Path, **options: Any) -> Path:
    now = fake("now.jsonl", steps=40, **options)
    old = fake("old.jsonl", steps=90, seeds=3, trained=True, label="committed record", **options)
    write_text(folder / "page.html", render(page_of(load([now, old]), "A comparison")))
    return folder / "page.html"


@pytest.mark.parametrize("width", [400, 1600])
def test_everything_is_drawn_and_fits(fake, tmp_path, chromium, width):
    write(fake, tmp_path)
    seen = use(chromium, tmp_path, width, "drawn", USE)
    assert seen["errors"] == ""
    assert seen["early"] == seen["drawn"] == seen["plots"] == seen["filled"]
    assert seen["width"] == seen["window"] == width  # nothing sticks out sideways
    assert seen["misfits"] == 0  # also after the window changed its width


def test_pages_with_little_to_show_are_quiet(fake, tmp_path, chromium):
    records = load(fake(presets=("gpt2",), steps=2))
    write_text(tmp_path / "page.html", render(page_of(records)))
    dom = browse(chromium, tmp_path, (tmp_path / "page.html").as_uri(), "--dump-dom")
    assert re.search('data-drawn="[1-9]"', dom)
    assert 'data-theme="light"' in dom
    assert "data-errors" not in dom


def test_dark_is_dark(fake, tmp_path, chromium):
    page = write(fake, tmp_path)
    dark = "--blink-settings=preferredColorScheme=0"
    dom = browse(chromium, tmp_path, page.as_uri(), dark, "--dump-dom")
    assert 'data-theme="dark"' in dom
    assert "rgb(170, 180, 194)" in dom  # the baseline in its colour for dark pages
    assert "rgb(91, 100, 114)" not in re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)


@pytest.mark.parametrize(("page", "width"), [("diagnosis", 400), ("quantization", 1500)])
def test_pages_of_other_studies(tmp_path, chromium, page, width):
    maps = ("map 1", "map 2", "difference")
    path = tmp_path / "diagnosis.jsonl"
    path.write_text(encode(records_of("plain") + records_of(HOSTILE, maps=maps)), "utf-8")
    schemes = lines("one", 10.0) + lines(HOSTILE, 900.0, broken="no interface")
    records = {"diagnosis": load(path), "quantization": parse(schemes)}
    write_text(tmp_path / "page.html", render(page_of(records[page], "Two")))
    seen = use(chromium, tmp_path, width, "drawn", USE)
    assert (seen["title"], seen["errors"]) == ("Two", "")
    assert seen["drawn"] == seen["plots"] == seen["filled"] > 0
    if page == "diagnosis":
        assert 0 < seen["early"] < seen["drawn"]  # what is folded is drawn when it is opened
    assert seen["width"] == seen["window"] == width
    assert (seen["links"], seen["images"], seen["bold"]) == (0, 0, 0)
