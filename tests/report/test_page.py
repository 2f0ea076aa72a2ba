"""The page as text: complete, self-contained, escaped, and whole when pieces are missing."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from clearhead.errors import ClearheadError
from clearhead.report import append, load, narrative, write_page
from clearhead.report.page import embed, render

Fake = Callable[..., Path]
HOSTILE = (
    "</script><script>document.title='hacked'</script>"
    "<img src=x onerror=\"document.title='hacked'\">'\"&lt;\u2028"
)


def own(page: str) -> str:
    """The page without the scripts."""
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def payload(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_a_whole_page(fake: Fake, tmp_path: Path) -> None:
    records = load(
        [
            fake("now.jsonl", steps=20),
            fake("old.jsonl", steps=40, seeds=3, label="committed record, 20 M tokens"),
        ]
    )
    path = tmp_path / "report" / "index.html"
    write_page(records, path, title="A comparison")
    page = path.read_text(encoding="utf-8")
    text = own(page)
    for section in ("comparison", "training", "lengths", "attention", "first-token", "layers"):
        assert f'<section id="{section}">' in text
    assert "This run" in text
    assert "Committed record, 20 M tokens" in text
    assert "clearhead compare --tokens 300000" in text
    assert "torch 2.13.0" in text
    assert len(payload(page)["figures"]) == 30  # type: ignore[arg-type]
    assert list(path.parent.iterdir()) == [path]  # nothing temporary stays
    assert len(page) < 6_000_000


def test_nothing_is_asked_of_the_network(fake: Fake) -> None:
    text = own(render(load(fake(steps=3)), title="t"))
    assert re.findall(r"https?://|@import|url\(", text) == []
    sources = re.findall(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"([^\"]*)\"", text)
    assert sources == ["data:,"]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert "default-src &#x27;none&#x27;" in policy.group(1)
    assert "script-src &#x27;sha256-" in policy.group(1)
    assert "unsafe-eval" not in policy.group(1)


def test_text_of_records_never_becomes_markup(fake: Fake) -> None:
    path = fake(
        presets=("transformer", HOSTILE),
        tokens=[HOSTILE, "<b>bold</b>", "%{x}", "$x$"],
        command=HOSTILE,
        label=HOSTILE,
        steps=3,
    )
    page = render(load(path), title=HOSTILE)
    assert "<img" not in own(page)
    assert "<script>document" not in page
    assert page.count("</script>") == 3
    assert payload(page)["figures"]


def test_json_cannot_close_its_script() -> None:
    text = embed({"</script>": "<!--&\u2028"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"</script>": "<!--&\u2028"}


@pytest.mark.parametrize("presets", [("transformer",), ("softmax1",), ("gpt2", "transformer")])
def test_few_presets(fake: Fake, presets: tuple[str, ...]) -> None:
    page = render(load(fake(presets=presets, steps=2)), title="t")
    assert '<section id="attention">' in page
    if "gpt2" in presets:
        assert "learned positions end at 256 tokens" in own(page)


def test_pieces_may_be_missing(fake: Fake, tmp_path: Path) -> None:
    assert '<section id="attention">' not in render(load(fake(attention=False)), title="t")
    assert "no records" in render(load([]), title="t")
    bare = tmp_path / "bare.jsonl"
    append(bare, {"kind": "run", "run": "a/seed0", "preset": "a", "seed": 0})
    page = render(load(bare), title="t")
    assert '<section id="training">' not in page
    assert '<section id="made">' in page
    append(bare, {"kind": "step", "run": "a/seed0", "step": 1, "loss": float("nan"), "tokens": 8})
    render(load(bare), title="t")


def test_the_lead_is_built_from_the_records(fake: Fake) -> None:
    one = load(fake(steps=5, attention=False))
    assert narrative.lead(one, 0.05) == (
        "Three language models, transformer, differential and softmax1, were trained on the same "
        "text: in this run a single seed cannot say which predicts unseen text better."
    )
    assert "no sink on the first token has formed" in narrative.findings(one)
    assert "Each model read the same 10.2\u00a0k tokens, with one seed." in narrative.findings(one)
    one.runs[0].header["data"] = {"fingerprint": "another"}
    assert "the same" not in narrative.lead(one, 0.05) + narrative.findings(one)
    label = {"label": "longer", "trained": True, "seeds": 3}
    long = load(fake("long.jsonl", steps=5, attention=False, **label))
    assert narrative.lead(long, 0.05).endswith(
        "in “longer” differential and softmax1 predict unseen text better than transformer."
    )
    assert "exceeds the spread of the seeds" in narrative.lead(long, 1e-9)  # of very many
    assert "no sink" not in narrative.findings(long)


def test_a_page_is_written_whole_or_not_at_all(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = load(fake(steps=1, attention=False))
    path = tmp_path / "out" / "page.html"
    write_page(records, path, title="first")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ClearheadError, match="No space left"):
        write_page(records, path, title="second")
    assert "first" in path.read_text()
    assert list(path.parent.iterdir()) == [path]
