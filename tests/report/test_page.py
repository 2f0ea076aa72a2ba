"""The page as text: complete, self-contained, escaped, and whole when pieces are missing."""

import re
from collections.abc import Callable
from pathlib import Path

from clearhead.records.jsonl import append
from clearhead.records.loading import parse
from clearhead.report import load, narrative, page_of, render, style
from clearhead.report.comparison import comparison, verdict
from clearhead.report.pivots import by_arm

from . import test_diagnosis as diagnosis
from . import test_quantization as quantization
from .conftest import own, payload, shown

Fake = Callable[..., Path]
HOSTILE = (
    "</script><script>document.title='hacked'</script>"
    "<img src=x onerror=\"document.title='hacked'\">'\"&lt;\u2028{{ 7 * 7 }}"
)


def test_a_whole_page(fake):
    old = fake("old.jsonl", steps=40, seeds=3, label="committed record, 20 M tokens")
    records = load([fake("now.jsonl", steps=20), old])
    page = render(page_of(records))
    text = own(page)
    for section in ("comparison", "training", "lengths", "internals"):
        assert f'<section id="{section}">' in text
    assert "<h1>transformer, differential and softmax1</h1>" in text
    assert text.count('scope="rowgroup">this run</th>') == 2  # compared, and inside
    assert text.count('scope="rowgroup">committed record, 20 M tokens</th>') == 2
    assert "clearhead compare --tokens 300000" in text
    assert "torch 2.13.0" in text
    places = re.findall(r'class="plot [a-z]+" id="([^"]+)"', text)
    assert places == list(payload(page)["figures"])  # each figure has its place
    assert len(page) < 6_000_000


def test_the_verdict_and_the_cost_come_before_the_internals(fake):
    records = load(fake(steps=20, seeds=3, trained=True))
    page = page_of(records)
    text = own(render(page))
    perplexity, speed = page.verdict
    assert perplexity == (
        "Validation perplexity: transformer 13.95 ± 0.11; differential 13.14 ± 0.14, lower by "
        "0.81; softmax1 12.105 ± 0.046, lower by 1.8."
    )
    assert speed.startswith("Training speed in tokens/s: transformer 6,598.4 ± 3.0; differential ")
    parts = ("Validation perp", "Training speed", "peak memory", "look most")
    order = [text.index(part) for part in parts]
    folded = text.index('<details class="folded">')
    assert sorted(order)[:2] == order[:2]
    assert order[2] < folded < text.index("argmax share")
    for section in page.sections:
        assert section.folded == (section.name not in ("comparison", "training", "lengths"))


def test_rows_say_how_many_seeds_there_are_and_what_has_hardly_learnt(fake):
    records = load(fake(steps=3, seeds=2))
    for run in records.of("softmax1"):
        run.header["model"]["vocab_size"] = 1024  # whose root is 32, below perplexities of 39
    notes = [row.note for row in by_arm(records, "", comparison(records)).rows]
    assert notes == ["reference, 2 seeds", "2 seeds", "2 seeds, hardly learnt"]


def test_nothing_is_asked_of_the_network(fake):
    text = own(render(page_of(load(fake(steps=3)))))
    assert re.findall(r"https?://|@import|url\(", text) == []
    sources = re.findall(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"([^\"]*)\"", text)
    assert sources == ["data:,"]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert "default-src &#39;none&#39;" in policy.group(1)
    assert "script-src &#39;sha256-" in policy.group(1)
    assert "unsafe-eval" not in policy.group(1)


def test_text_of_records_never_becomes_markup(fake):
    path = fake(presets=("transformer", HOSTILE), command=HOSTILE, label=HOSTILE, steps=3)
    page = render(page_of(load(path), HOSTILE))
    assert "<img" not in own(page)
    assert "<script>document" not in page
    assert page.count("</script>") == 3
    assert payload(page)["figures"]
    assert "{{ 7 * 7 }}" in page  # no template is made of it either


def test_markup_is_escaped_by_the_template_alone():
    source = Path(narrative.__file__).parents[1]
    assert not [path for path in source.rglob("*.py") if "html.escape" in path.read_text("utf-8")]
    assert not [path for path in source.rglob("*.html") if "|safe" in path.read_text("utf-8")]


def test_pieces_may_be_missing():
    assert "no records" in shown(page_of(load([])))
    lines = [{"kind": "run", "run": "a/seed0", "preset": "a", "seed": 0}]
    page = render(page_of(parse(lines)))
    assert '<section id="training">' not in page
    assert '<section id="made">' in page
    step = {"kind": "step", "run": "a/seed0", "step": 1, "loss": None, "tokens": 8}
    render(page_of(parse([*lines, step])))


def test_the_verdict_has_a_sentence_for_each_label(fake):
    options = {"steps": 5, "seeds": 3}
    page = page_of(load([fake(f"{name}.jsonl", label=name, **options) for name in ("one", "two")]))
    perplexity, speed = page.verdict
    assert re.match(r"Validation perplexity: One: transformer .*\. Two: transformer", perplexity)
    assert speed.startswith("Training speed in tokens/s: One: transformer ")
    records = load(fake("long.jsonl", trained=True, **options))
    assert ", alone;" in verdict(records, 1e-9)[0]  # of very many comparisons


def test_of_many_arms_the_verdict_names_the_ends():
    lines = []
    for n, preset in enumerate(["transformer", *"abcdefgh"]):
        lines.append({"kind": "run", "run": preset, "preset": preset, "seed": 0})
        line = {"kind": "measure", "run": preset, "metric": "perplexity", "value": 10.0 + n}
        lines.append(line)
    assert page_of(parse(lines)).verdict == [
        "Validation perplexity: transformer 10.0; h 18.0; 7 more between them."
    ]


def test_records_of_several_studies_share_a_page(fake, tmp_path):
    diagnosed, quantized = tmp_path / "diagnosis.jsonl", tmp_path / "quantization.jsonl"
    append(diagnosed, *diagnosis.records_of("transformer"))
    append(quantized, *quantization.lines("transformer", 10.0, broken="no interface"))
    alone = [page_of(load(path)) for path in (fake(steps=20), diagnosed, quantized)]
    page = page_of(load([fake(steps=20), diagnosed, quantized]))
    assert page.verdict == [words for one in alone for words in one.verdict]
    assert len(page.sections) == sum(len(one.sections) for one in alone) - 2  # provenance once
    names = [section.name for section in page.sections]
    assert len({*names}) == len(names)
    assert {"comparison-comparison", "diagnosis-numbers", "quantization-numbers"} <= {*names}
    assert page.warnings == alone[2].warnings
    assert "peak memory" in own(render(page))


def test_many_arms_stay_apart():
    optimizers = ("adamw", "orthoadam", "sgd", "rmsprop", "adafactor", "muon", "soap", "lion")
    lines = []
    for arm in (f"{one} · {two}" for one in ("transformer", "softmax1") for two in optimizers):
        lines.append({"kind": "run", "run": arm, "arm": arm, "preset": arm.split()[0], "seed": 0})
        line = {"kind": "measure", "run": arm, "metric": "perplexity", "value": 9.0}
        lines += [{**line, "length": length} for length in (64, 128)]
    page = page_of(parse(lines))
    looks = page.looks.values()
    assert len({(look.colour, look.symbol) for look in looks}) == len(looks) == 16
    assert len({look.colour for look in [*looks][:12]}) == 12
    assert all(style.LIGHT_TO_DARK[look.colour] == look.dark for look in looks)
    key = own(render(page)).split('<ul class="key">')[1].split("</ul>")[0]
    assert key.count("<li>") == 16
    assert "softmax1 · lion" in key
