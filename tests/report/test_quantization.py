"""Records of a quantisation, its tables and its page, in a browser too."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from clearhead import ClearheadError
from clearhead.quantize import every, scheme
from clearhead.report import style
from clearhead.report.quantization import families, load, parse, schemes, write
from clearhead.report.quantization_page import render, write_quantization
from clearhead.report.quantization_tables import (
    KINDS,
    SCALES,
    bits_html,
    kind_of,
    remarks,
    scale_of,
    to_console,
)

HOSTILE = "</script><img src=x onerror=\"document.title='hacked'\"><b>b</b>"


def lines(name: str, full: float, *, questions: int = 0, broken: str = "") -> list[dict[str, Any]]:
    """A model whose perplexity rises by a quarter with each bit below 8."""
    header = {
        "kind": "quantization",
        "run": name,
        "path": f"runs/{name}",
        "class": "Llama",
        "dtype": "float32",
        "parameters": 1000,
        "quantized_parameters": 600,
        "left_out": {"experts.up": 300} if broken else {},
        "length": 16,
        "tokens": 64,
        "questions": questions,
        "choices": "arc.jsonl",
        "chance": 0.25 if questions else None,
        "versions": {"torch": "2"},
    }
    found = [header]
    for each in (None, *every()):
        made = None if each is None else scheme(each)
        value: float | None = full
        if made is not None and made.bits is not None:
            value = full * (1.001 if made.bits == 8 else 1 + 0.25 * (8 - made.bits))
        reason = None
        if broken and each is not None and each.startswith("logits"):
            value, reason = None, broken
        found.append(
            {
                "kind": "scheme",
                "run": name,
                "scheme": each,
                "family": made and made.family,
                "bits": made and made.bits,
                "perplexity": value,
                "delta": None if value is None or made is None else value - full,
                "accuracy": 0.5 if questions else None,
                "accuracy_normalised": 0.25 if questions else None,
                "reason": reason,
                "unused": ["experts.3"] if broken and each == "w8a8-token" else [],
            }
        )
    return found


def test_records_come_back(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    write(path, lines("one", 10.0))
    write(path, lines("two", 20.0))
    write(path, lines("one", 30.0))  # measured again
    models = load([path])
    assert [model.name for model in models] == ["one", "two"]
    assert [model.full.perplexity for model in models] == [30.0, 20.0]
    assert schemes(models) == every()
    assert set(families(models)) == {scheme(name).family for name in every()}
    result = models[1].results["w4-channel"]
    assert (result.bits, result.perplexity, result.delta) == (4, 40.0, 20.0)
    assert list(models[1].family("w-channel")) == [8, 6, 4, 3]
    assert not list(path.parent.glob(".*"))


def test_the_fewest_bits_that_are_enough():
    (model,) = parse(lines("one", 10.0))
    assert model.fewest_bits("wa-coarse") == 8
    assert model.fewest_bits("no such family") is None
    (model,) = parse(lines("one", 10.0, broken="no interface"))
    assert "more than" not in bits_html([model], {"one": style.looks(["one"])["one"]})
    found = lines("one", 10.0)
    for line in found:  # 3 bits by chance as good as none: 4 are not, so 8 are needed
        if line.get("scheme") == "w3-channel":
            line["perplexity"] = 10.0
        if line.get("scheme") == "w8-group":
            line["perplexity"] = 11.0
    (model,) = parse(found)
    assert model.fewest_bits("w-channel") == 8
    assert model.fewest_bits("w-group") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind": "run", "run": "x"}', "line 1: not a record of a quantisation: unknown kind"),
        ('{"kind": "scheme", "run": "x"}', "no line of kind"),
        ('{"kind": "quantization"}', "lacks 'run'"),
        ("[1]", "line 1: not a record"),
        ("{\n", "line 1: not a record"),
        ("nonsense", "line 1: not a record"),
        ('{"kind": "quantization", "run": "x"}', "x has no result in full precision"),
    ],
)
def test_files_of_something_else(tmp_path, text, message):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(ClearheadError, match=message):
        load([path])
    with pytest.raises(ClearheadError, match=message):
        write(path, lines("one", 1.0))
    assert path.read_text() == text  # and nothing is added to them
    with pytest.raises(ClearheadError, match="cannot read"):
        load([tmp_path / "none"])


def test_every_family_is_named_in_words():
    for name in every():
        family = scheme(name).family
        assert family in SCALES
        assert kind_of(family) in KINDS.values()
    assert scale_of(scheme("w3-group64").family) == "a scale 64 inputs of a channel"
    assert kind_of(scheme("w3-group64").family) == KINDS["w"]


def _printed(model: Any) -> str:
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(to_console(model))
    return console.export_text()


def test_the_console_has_every_number_and_every_reason():
    (model,) = parse(lines("[b]one", 10.0, questions=8, broken="no interface"))
    text = _printed(model)
    assert "[b]one" in text
    assert re.search(r"full precision\s*│\s*10\.00\s*│\s*│\s*50\.0\s%\s*│\s*25\.0\s%", text)
    assert re.search(r"w4-channel\s*│\s*20\.00\s*│\s*\+10\.000", text)
    assert re.search(r"logits4-row\s*│\s*none", text)
    assert "8 questions of arc.jsonl, chance 25.0\u00a0%" in text
    reasons, left_out, unused = remarks(model)
    assert reasons.endswith(": no interface")
    assert reasons.count("logits") == 9
    assert "33.3\u00a0% of the matrices" in left_out
    assert "experts.3" in unused
    (plain,) = parse(lines("two", 10.0))
    assert remarks(plain) == []
    assert "accuracy" not in _printed(plain)
    boolq = lines("three", 10.0, questions=8)
    for line in boolq[1:]:
        line["accuracy_normalised"] = None  # as of BoolQ
    (without,) = parse(boolq)
    assert re.search(r"full precision\s*│\s*10\.00\s*│\s*│\s*50\.0\s%\s*│\s*–", _printed(without))
    assert "50.0\u00a0%, " not in render([without], title="t")
    assert "50.0\u00a0%" in render([without], title="t")


def test_families_stand_in_one_order_whoever_has_them():
    """Where the first model has no result of a family, that is not put last."""
    first, second = lines("one", 10.0), lines("two", 9.0)
    for line in first:
        if line.get("family") == "w-channel":
            line.update(perplexity=None, delta=None, reason="none")
    assert families(parse(first + second)) == families(parse(second))
    assert "w-channel" not in families(parse(first))


def test_the_page_shows_all_and_is_safe():
    models = parse(lines("one", 10.0, questions=8) + lines(HOSTILE, 9.0, broken=HOSTILE))
    page = render(models, title=HOSTILE)
    assert "<img" not in page
    assert page.count('<div class="plot') == 9
    assert "20.00 (+10.000)" in page
    assert "50.0\u00a0%, 25.0\u00a0%" in page
    assert "33.3\u00a0% of the matrices" in page


def test_a_page_without_families():
    found = [line for line in lines("one", 10.0) if line.get("bits") is None]
    page = render(parse(found), title="Little")
    assert 'id="bits"' not in page
    assert 'id="numbers"' in page


@pytest.mark.browser
@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_in_a_browser(tmp_path: Path, width: int) -> None:
    chromium = os.environ.get("CLEARHEAD_CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        if os.environ.get("CLEARHEAD_REQUIRE_BROWSER") == "1":
            pytest.fail("Chromium is required here, and neither on the path nor named")
        pytest.skip("no Chromium on the path, and $CLEARHEAD_CHROMIUM is not set")
    models = parse(lines("one", 10.0) + lines(HOSTILE, 900.0, broken="no interface"))
    write_quantization(models, tmp_path / "page.html", title="Bits")
    driver = tmp_path / "driver.html"
    driver.write_text(DRIVER.replace("WIDTH", str(width)), encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --hide-scrollbars"
    files = ("--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}")
    command = [chromium, *flags.split(), *files, "--virtual-time-budget=30000", "--dump-dom"]
    done = subprocess.run([*command, driver.as_uri()], capture_output=True, timeout=120, check=True)
    seen = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout.decode())
    assert seen is not None, "the page was never drawn"
    assert seen.group(1) == f"9 drawn, 9 filled, 0 misfit, {width} of {width} wide, Bits, errors: "


DRIVER = """<!doctype html>
<iframe src="page.html" style="width:WIDTHpx;height:900px;border:0"></iframe>
<script>
const frame = document.querySelector("iframe");
const timer = setInterval(() => {
  const page = frame.contentDocument;
  if (!page || !page.documentElement.dataset.drawn) return;
  clearInterval(timer);
  const root = page.documentElement;
  const filled = [...page.querySelectorAll(".plot")].filter(
    (plot) => plot.querySelectorAll("svg.main-svg .trace").length >= 1).length;
  const misfit = [...page.querySelectorAll(".plot")].filter((plot) =>
    Math.abs(plot.querySelector("svg.main-svg").clientWidth - plot.clientWidth) > 1).length;
  const out = document.body.appendChild(document.createElement("pre"));
  out.id = "seen";
  out.textContent = `${root.dataset.drawn} drawn, ${filled} filled, ${misfit} misfit, ` +
    `${root.scrollWidth} of ${root.clientWidth} wide, ${page.title}, ` +
    `errors: ${root.dataset.errors ?? ""}`;
}, 100);
</script>"""
