"""Records of a quantisation, its tables and its page, in a browser too."""

import re
from typing import Any

from clearhead.quantize import every, scheme
from clearhead.records.loading import parse
from clearhead.report import page_of, render
from clearhead.report.page import Panel
from clearhead.report.quantization import remarks_on, schemes

from .conftest import own, printed, shown

HOSTILE = "</script><img src=x onerror=\"document.title='hacked'\"><b>b</b>"


def lines(name: str, full: float, *, broken: str = "") -> list[dict[str, Any]]:
    """A model whose perplexity rises by a quarter with each bit below 8."""
    header = {"kind": "run", "study": "quantization", "run": name, "weights": str(full)}
    header |= {"path": f"runs/{name}", "class": "Llama", "dtype": "float32", "parameters": 1000}
    header |= {"quantized_parameters": 600, "length": 16, "tokens": 64, "versions": {"torch": "2"}}
    found = [{**header, "left_out": {"experts.up": 300} if broken else {}}]
    for each in (None, *every()):
        made = None if each is None else scheme(each)
        value: float | None = full
        if made is not None and made.bits is not None:
            value = full * (1.001 if made.bits == 8 else 1 + 0.25 * (8 - made.bits))
        reason = None
        if broken and each is not None and each.startswith("logits"):
            value, reason = None, broken
        details = {
            **({} if made is None else {"scheme": each, "family": made.family, "bits": made.bits}),
            "unused": ["experts.3"] if broken and each == "w8a8-token" else [],
        }
        added = None if value is None or made is None else value - full
        numbers = {"perplexity": value, "added_perplexity": added}
        found += [
            {"kind": "measure", "run": name, "metric": metric, "value": number, **details}
            | ({} if reason is None else {"reason": reason})
            for metric, number in numbers.items()
            if number is not None or metric == "perplexity"
        ]
    return found


def test_records_come_back():
    records = parse(lines("one", 10.0) + lines("two", 20.0) + lines("one", 30.0))  # measured again
    assert [run.id for run in records.runs] == ["one", "two"]
    assert [run.value("perplexity") for run in records.runs] == [30.0, 20.0]
    assert list(schemes(records)) == every()
    assert schemes(records)["w4-channel"] == ("w-channel", 4)
    two = records.runs[1]
    assert two.value("perplexity", scheme="w4-channel") == 40.0
    assert two.value("added_perplexity", scheme="w4-channel") == 20.0
    panel = next(block for block in page_of(records).blocks() if isinstance(block, Panel))
    assert panel.figure.layout.xaxis.categoryarray == ("full", "8", "6", "4")


def test_without_full_precision_no_cost_is_known():
    found = [line for line in lines("one", 10.0) if line["kind"] == "run" or "scheme" in line]
    page = page_of(parse(found))
    assert page.verdict == ["No perplexity could be measured in full precision."]
    assert "perplexity: 20.00" in printed(page)


def test_the_console_has_every_number_and_every_reason():
    records = parse(lines("[b]one", 10.0, broken="no interface"))
    text = printed(page_of(records), 160)
    assert "[b]one" in text
    assert re.search(r"full precision\s*│\s*perplexity: 10\.00\s*│", text)
    assert re.search(r"w4-channel\s*│\s*100\s%\s*│", text)
    assert re.search(r"logits4-row\s*│\s*perplexity: none", text)
    reasons, left_out, unused = remarks_on(records.runs[0])
    assert reasons in " ".join(text.split())
    assert reasons.endswith(": no interface")
    assert reasons.count("logits") == 9
    assert "33.3\u00a0% of the matrices" in left_out
    assert "experts.3" in unused
    plain = parse(lines("two", 10.0))
    assert not [*remarks_on(plain.runs[0])]


def test_seeds_of_one_model_have_a_spread_and_a_verdict():
    found = [line for seed in range(3) for line in lines(f"a-seed{seed}", 10.0 + seed)]
    found += [line for seed in range(3) for line in lines(f"b-seed{seed}", 30.0 + seed)]
    text = shown(page_of(parse(found)))
    assert "11.0 ± 1.0" in text
    assert "Rise of perplexity under w3-channel: a 125" in text
    found = lines("tuned", 10.0) + lines("other", 11.0)
    found[0]["train"] = {"tokens": 9}
    assert "seed" not in shown(page_of(parse(found))).lower()  # where none varies


def test_the_page_shows_all_and_is_safe():
    page = page_of(parse(lines("one", 10.0) + lines(HOSTILE, 9.0, broken=HOSTILE)), HOSTILE)
    text = own(render(page))
    assert "<img" not in text
    for ends in ("w8a8-coarse to w4a4-token", "w8-channel to w3-group"):
        assert f"<h3>{ends}</h3>" in text
    seen = shown(page)
    assert "100 % perplexity 20.00" in seen
    assert "33.3\u00a0% of the matrices" in text
    assert [section.name for section in page.sections][:2] == ["bits", "numbers"]


def test_the_verdict_is_what_the_dearest_and_the_cheapest_scheme_cost_each_model():
    better, worse = lines("better", 10.0), lines("worse", 20.0)
    for line in worse:
        if line.get("metric") == "perplexity" and "scheme" in line:
            line["value"] = line["value"] and 1.5 * line["value"]
    worse = [line for line in worse if line.get("metric") != "added_perplexity"]
    text = page_of(parse(better + worse)).verdict[0]
    assert "Rise of perplexity under w3-channel: better 125\u00a0%; worse 238\u00a0%." in text
    dearest, cheapest = page_of(parse(better)).verdict
    assert dearest == "Rise of perplexity under w3-channel: 125\u00a0%."
    assert cheapest.startswith("Rise of perplexity under ")


def test_a_page_without_families():
    found = [line for line in lines("one", 10.0) if line.get("bits") is None]
    page = render(page_of(parse(found)))
    assert 'id="bits"' not in page
    assert 'id="numbers"' in page
