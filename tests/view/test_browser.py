"""The viewer's page in a real browser: clicks and keys change what it shows, and nothing runs."""

from pathlib import Path

import pytest
from tests_chromium import HOSTILE, use

from clearhead.view import Observation, observe_text, render

pytestmark = pytest.mark.browser
USE = """
async function use(page, view) {
  const all = (selector) => [...page.querySelectorAll(selector)];
  const drawn = (selector) => all(selector).map((canvas) => canvas.toDataURL());
  const key = (target, name) => target.dispatchEvent(
    new view.KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
  const state = () => ({
    heads: all(".map h3").map((e) => e.textContent),
    tokens: all(".reading h3").map((e) => e.textContent),
    maps: drawn(".weights"),
    reads: all(".reading .pair > div:first-child li").map((e) => e.textContent),
    coloured: all(".token").filter((e) => e.style.backgroundColor).length,
    under: all(".token").filter((e) => e.style.boxShadow).length,
    predictions: all(".lens td").map((e) => e.textContent),
    grids: drawn(".grid"),
  });
  const seen = { start: state(), width: page.documentElement.scrollWidth, title: page.title };
  const grid = page.querySelector(".grid");
  const box = grid.getBoundingClientRect();
  const click = (target, x, y) => target.dispatchEvent(
    new view.MouseEvent("click", { clientX: x, clientY: y, bubbles: true }));
  const cell = Math.min(48, (box.width - 24) / 3);
  const row = Math.min(30, Math.max(9, cell));
  click(grid, box.left + 24 + cell * 2.5, box.top + row * 1.5);
  await pause(300);
  seen.head = state();
  click(page.querySelectorAll(".token")[5], 0, 0);
  await pause(300);
  seen.token = state();
  key(page.body, "t");
  seen.focus = page.activeElement.className;
  key(page.activeElement, "ArrowRight");
  await pause(300);
  seen.right = state();
  key(page.body, "h");
  key(page.activeElement, "ArrowLeft");
  await pause(300);
  seen.left = state();
  const metric = page.getElementById("metric");
  seen.metrics = [...metric.options].map((option) => option.value);
  metric.value = "entropy";
  metric.dispatchEvent(new view.Event("change"));
  seen.entropy = state().grids;
  metric.value = "maps";
  metric.dispatchEvent(new view.Event("change"));
  await pause(300);
  seen.small = state().grids;
  const named = page.querySelector(".pick");
  if (named) { named.click(); await pause(300); seen.named = state(); }
  seen.names = all(".one .pick").map((e) => e.textContent);
  const by = page.getElementById("textby");
  by.value = "surprise";
  by.dispatchEvent(new view.Event("change"));
  seen.surprise = all(".token").map((e) => e.style.backgroundColor);
  seen.contrast = Math.min(...all(".token, .lens td").filter((e) => e.style.color).map((e) => {
    const parse = (text) => luminance(text.match(/\\d+/g).map(Number));
    const [a, b] = [parse(e.style.color), parse(e.style.backgroundColor)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  }));
  const style = view.getComputedStyle(page.body);
  seen.body = [style.color, style.backgroundColor];
  seen.room = all(".warning").map((e) => e.textContent);
  seen.images = all("img, a, main b b, iframe, object").length;
  seen.end = page.title;
  return seen;
}
const luminance = (rgb) => rgb.map((v) => v / 255)
  .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
"""


def write(folder: Path, *observations: Observation, title: str = "A page") -> None:
    (folder / "page.html").write_text(render(observations, title=title), encoding="utf-8")


@pytest.mark.parametrize("width", [420, 1900])
def test_clicks_and_keys_change_what_is_shown(make, tokenizer, words, tmp_path, chromium, width):
    write(tmp_path, observe_text(make("Llama"), tokenizer, words, name="tiny"))
    seen = use(chromium, tmp_path, width, "ready", USE)
    assert seen["width"] == width  # nothing sticks out sideways
    start, head, token, right, left = (
        seen[name] for name in ("start", "head", "token", "right", "left")
    )
    assert head["heads"] == ["Layer 2, head 1"]
    assert head["maps"] != start["maps"]
    assert head["reads"] != start["reads"]
    assert token["tokens"] == ["Token ·the (5)"]
    assert token["maps"] == head["maps"]
    assert token["reads"] != head["reads"]
    assert 0 < token["coloured"] <= 6  # it reads itself and the five before
    assert token["under"] > 0
    assert token["predictions"] != head["predictions"]
    assert len(token["predictions"]) == 4 * 4
    assert seen["focus"] == "text"
    assert right["tokens"] == ["Token ·mat (6)"]
    assert left["heads"] == ["Layer 1, head 1"]
    assert seen["metrics"] == ["first_token_share", "entropy", "maps"]
    assert seen["entropy"] != left["grids"]
    assert seen["small"] not in (seen["entropy"], left["grids"])
    assert not seen["surprise"][0]
    assert all(seen["surprise"][1:])
    assert seen["contrast"] >= 4.5
    assert seen["room"] == []


def test_two_models_are_linked_and_signed_maps_have_their_lambda(
    make, tokenizer, words, tmp_path, chromium
):
    one = observe_text(make("softmax1"), tokenizer, words, name="softmax1")
    two = observe_text(make("differential"), tokenizer, words, name="differential")
    write(tmp_path, one, two)
    seen = use(chromium, tmp_path, 1900, "ready", USE)
    assert seen["width"] == 1900
    assert seen["head"]["heads"] == ["Layer 2, head 1"] * 2
    assert seen["token"]["tokens"] == ["Token ·the (5)"] * 2
    assert seen["right"]["tokens"] == ["Token ·mat (6)"] * 2
    assert len(seen["head"]["maps"]) == 1 + 3
    labels = "".join(seen["names"]).split()
    assert " ".join(labels[:2] + labels[3:]) == "map 1− × map 2= difference"
    assert 0 < float(labels[2]) < 1
    assert seen["named"]["reads"] != seen["left"]["reads"]
    assert seen["metrics"] == [
        *("first_token_share", "null_mass", "entropy", "negative_share", "maps")
    ]
    assert any("null key" in line for line in seen["start"]["reads"])


def test_hostile_text_and_names_stay_text(make, tokenizer, tmp_path, chromium):
    found = observe_text(make("Llama"), tokenizer, HOSTILE * 2, name=HOSTILE)
    write(tmp_path, found, title=HOSTILE)
    seen = use(chromium, tmp_path, 900, "ready", USE)
    assert seen["title"] == seen["end"] == HOSTILE
    assert seen["images"] == 0


def test_dark_is_dark_and_as_legible(make, tokenizer, words, tmp_path, chromium):
    write(tmp_path, observe_text(make("Llama"), tokenizer, words, name="tiny"))
    seen = {
        name: use(
            chromium, tmp_path, 900, "ready", USE, f"--blink-settings=preferredColorScheme={scheme}"
        )
        for name, scheme in (("dark", 0), ("light", 1))
    }
    assert seen["dark"]["body"] == ["rgb(221, 226, 233)", "rgb(22, 25, 30)"]
    assert seen["light"]["body"] == ["rgb(34, 38, 44)", "rgb(253, 252, 249)"]
    assert seen["dark"]["contrast"] >= 4.5
    assert seen["dark"]["start"]["maps"] != seen["light"]["start"]["maps"]
