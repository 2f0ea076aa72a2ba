"""clearhead quantize as a person uses it: what it measures, saves, and how it refuses."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tests_architectures as architectures
import torch
from transformers import BartConfig, BartForConditionalGeneration

from clearhead import ClearheadForCausalLM, preset
from clearhead.cli import main
from clearhead.data import DataConfig, prepare
from clearhead.experiments.deployment import not_smaller
from clearhead.quantize import measure
from clearhead.records import manifest
from clearhead.records.cells import added
from clearhead.report import load

from .conftest import changed


def _call(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return stop.value.code


def _refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a refused request prints; nothing else, and exit code 2."""
    assert _call("quantize", *words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("clearhead: ")
    assert "Traceback" not in "".join(lines)
    return lines[-1]


def _saved(folder: Path, tokenizer: Any, **changes: Any) -> Path:
    shape = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 40,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    model = ClearheadForCausalLM(preset("transformer", **shape | changes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(text, cache):
    config = DataConfig(data=(str(text),), vocabulary=300, validation=0.1, cache=cache)
    return prepare(config).tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer) -> Path:
    """A run's folder, whose finished model is in "final"."""
    run = tmp_path_factory.mktemp("runs") / "mine"
    _saved(run / "final", tokenizer)
    return run


@pytest.fixture
def words(text, cache, monkeypatch) -> list[str]:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(cache))
    options = ["--data.data", str(text), "--data.validation", "0.1"]
    return [*options, "--length", "16", "--tokens", "48"]


def _questions(folder: Path) -> Path:
    row = {"question": "Which?", "choices": ["query", "key", "value"], "label": 1}
    path = folder / "q.jsonl"
    path.write_text("\n".join([json.dumps(row)] * 3))
    return path


def test_a_model_under_every_scheme(model, words, tmp_path, capsys):
    records, page = tmp_path / "r.jsonl", tmp_path / "p.html"
    pytest.importorskip("lm_eval")
    asked = ("--choices", str(_questions(tmp_path)), "--questions", "2")
    kept = ("--records", str(records), "--page", str(page))
    assert _call("quantize", str(model), *words, "--scheme", "all", *asked, *kept) == 0
    shown = capsys.readouterr()
    assert "w8a8-coarse" in shown.out
    assert "logits4-row" in shown.out
    assert "so they are channels" in " ".join(shown.out.split())  # w4-group: no layer is so wide
    assert re.search(r"mine: w8a8-coarse, perplexity [\d.]+, [+−][\d.]+ \[", shown.err)
    (found,) = load(records).runs
    assert found.id == "mine"
    assert found.header["tokens"] == 48
    assert found.header["questions"] == 2
    assert found.header["chance"] == pytest.approx(1 / 3)
    assert found.value("accuracy") in (0.0, 1.0)
    assert found.value("perplexity", scheme="w8a8-fine") != found.value("perplexity")
    assert found.header["calibration"] == "16 windows of the training split"
    assert page.read_text().count('<div class="plot') == 8  # the families that had results

    # A second model joins the first, in the file and on the page.
    other = _saved(tmp_path / "other", _tokenizer(model), hidden_size=48)
    some = ("--scheme", "w4-channel", "logits6-head")
    assert _call("quantize", str(other), *words, *some, *kept) == 0
    assert [each.id for each in load(records).runs] == ["mine", "other"]
    assert "other" in page.read_text()

    again = tmp_path / "again.html"
    assert _call("report", str(records), "--output", str(again)) == 0
    assert again.read_text() == page.read_text()


def test_accuracy_is_that_of_eval(model, words, tmp_path):
    """One file, one model: the same questions answered right by both verbs."""
    pytest.importorskip("lm_eval")
    asked = [("Which of them?", ["query", "key", "the value of it"]), ("Why?", ["attention", "no"])]
    questions = tmp_path / "asked.jsonl"
    rows = [
        {"question": f"{question} {n}", "choices": choices, "label": n % len(choices)}
        for n in range(8)
        for question, choices in asked
    ]
    questions.write_text("\n".join(map(json.dumps, rows)))
    few, records = tmp_path / "few.jsonl", tmp_path / "eval.jsonl"
    options = ("--scheme", "w4-channel", "--choices", str(questions), "--records", str(few))
    assert _call("quantize", str(model), *words, *options) == 0
    options = ("--tasks", "choices", "--choices.files", str(questions), "--records", str(records))
    assert _call("eval", str(model), *options) == 0
    (other,), (found,) = load(records).runs, load(few).runs
    ours = {one.metric: one.value for one in other.select("accuracy") + other.select("chance")}
    (by_length,) = other.select("accuracy_norm")
    assert found.value("accuracy") == ours["accuracy"]
    assert found.value("accuracy_normalised") == by_length.value
    assert found.header["chance"] == ours["chance"]
    assert 0 < ours["accuracy"] < 1


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model / "final")


def test_results_do_not_depend_on_what_ran_before(model, words, tmp_path):
    one, two = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    schemes = ("w4-channel", "w8a8-token", "logits4-head")
    assert _call("quantize", str(model), *words, "--scheme", *schemes, "--records", str(one)) == 0
    back = schemes[::-1]
    assert _call("quantize", str(model), *words, "--scheme", *back, "--records", str(two)) == 0
    ((first,), (second,)) = load(one).runs, load(two).runs
    assert first.measures == second.measures


def test_requests_that_cannot_be_met(model, words, tmp_path, capsys, tokenizer, text, monkeypatch):
    pytest.importorskip("lm_eval")
    folder = str(model)
    assert "choose 2 to 16" in _refusal(capsys, folder, "--scheme", "w1-channel")
    assert "choose 2 to 16" in _refusal(capsys, folder, "--scheme", "logits17-row")
    assert "did you mean" in _refusal(capsys, folder, "--scheme", "w8a8-corse")
    assert "each once" in _refusal(capsys, folder, folder)
    assert "length is 1: give a whole number" in _refusal(capsys, folder, "--length", "1")
    assert "no effect" in _refusal(capsys, folder, "--title", "x")
    assert "no effect" in _refusal(capsys, folder, "--questions", "3")
    assert "the model's own" in _refusal(capsys, folder, "--data.tokenizer", folder)
    assert "cannot load a model" in _refusal(capsys, str(tmp_path / "none"))
    long = changed(words, "--length", "100000", "--tokens", "100000")
    assert "enough for one window of 100000" in _refusal(capsys, folder, *long)
    learned = _saved(tmp_path / "learned", tokenizer, position="learned")
    longer = changed(words, "--length", "128", "--tokens", "128", "--scheme", "w4-channel")
    assert "64 learned positions" in _refusal(capsys, str(learned), *longer)
    small = _saved(tmp_path / "small", tokenizer, vocab_size=20)
    assert "use the tokenizer" in _refusal(capsys, str(small), *words, "--scheme", "w4-channel")
    other = text / "00.txt"
    assert "not a record" in _refusal(capsys, folder, *words, "--records", str(other))
    assert "not JSON" in _refusal(capsys, folder, *words, "--choices", str(other))
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "clearhead[lm-eval]" in _refusal(capsys, folder, "--choices", str(other))


def test_an_encoder_decoder_is_refused(words, tmp_path, capsys, tokenizer):
    config = BartConfig(
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        vocab_size=len(tokenizer),
    )
    BartForConditionalGeneration(config).save_pretrained(tmp_path / "bart")
    tokenizer.save_pretrained(tmp_path / "bart")
    assert "is an encoder-decoder" in _refusal(capsys, str(tmp_path / "bart"), *words)


def test_a_model_without_numbers_is_refused(words, tmp_path, capsys, tokenizer):
    folder = _saved(tmp_path / "broken", tokenizer)
    model = ClearheadForCausalLM.from_pretrained(folder)
    model.model.norm.weight.data.fill_(torch.nan)
    model.save_pretrained(folder)
    records = tmp_path / "r.jsonl"
    message = _refusal(capsys, str(folder), *words, "--records", str(records))
    assert "in full precision: the loss is nan" in message
    assert not records.exists()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
)
def test_out_of_memory_keeps_what_is_done_and_the_same_command_goes_on(
    model, words, tmp_path, capsys, monkeypatch, error
):
    records, page = tmp_path / "r.jsonl", tmp_path / "p.html"
    runs = []
    real = measure.perplexity

    def failing(*arguments: Any, **options: Any) -> Any:
        runs.append(1)
        if len(runs) == 3:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(measure, "perplexity", failing)
    kept = ("--records", str(records), "--page", str(page))
    message = _refusal(capsys, str(model), *words, *kept)
    assert "out of memory: give a smaller --length than 16" in message
    assert message.endswith(f"what is done is in {records}, and the same command goes on")
    assert not page.exists()
    assert _schemes(records) == [None, "w8a8-coarse"]
    assert _call("quantize", str(model), *words, *kept) == 0
    assert len(runs) == 3 + 2  # no layer is as wide as a group: nothing is run
    assert _schemes(records) == [None, "w8a8-coarse", "w8a8-token", "w4-channel", "w4-group"]
    assert page.exists()
    assert _call("quantize", str(model), *words, *kept) == 0
    assert len(runs) == 3 + 2  # all known


def _schemes(records: Path) -> list[str | None]:
    """The schemes of a file of one model, as they were measured."""
    (run,) = load(records).runs
    return [cell["at"].get("scheme") for cell in run.cells]


def test_seeds_of_the_windows_are_pooled(model, words, tmp_path):
    one, two = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    some = [*words, "--scheme", "w4-channel"]
    assert _call("quantize", str(model), *some, "--records", str(one)) == 0
    assert _call("quantize", str(model), *some, "--records", str(one), "--seeds", "0", "1") == 0
    assert _call("quantize", str(model), *some, "--records", str(two), "--seeds", "1") == 0
    ((both,), (alone,)) = load(one).runs, load(two).runs
    pooled, second = (run.measure("perplexity", scheme="w4-channel") for run in (both, alone))
    assert len(pooled.details["items"]) == 2 * 3  # windows
    assert pooled.draws[1].value == second.value != pooled.draws[0].value
    cost = added(pooled, both.measure("perplexity"))
    each = [
        pooled.draws[seed].value - both.measure("perplexity").draws[seed].value for seed in (0, 1)
    ]
    assert cost.value == pytest.approx(sum(each) / 2)
    low, high = cost.details["interval"]
    assert low < cost.value < high


def test_another_model_of_the_same_name_replaces_the_first(words, tmp_path, tokenizer):
    records = tmp_path / "r.jsonl"
    for place, width in (("a", 24), ("b", 48), ("a", 24)):
        folder = tmp_path / place / "same"
        if not folder.exists():
            _saved(folder, tokenizer, hidden_size=width)
        options = ("--scheme", "w4-channel", "--records", str(records))
        assert _call("quantize", str(folder), *words, *options) == 0
        (run,) = load(records).runs
        assert run.header["path"] == str(folder)
        assert len(run.cells) == 2
        assert run.value("perplexity") is not None
    # The third time nothing was measured again: the first numbers were written again.
    first, *_, last = [
        json.loads(line)["value"]
        for line in records.read_text("utf-8").splitlines()
        if '"metric"' in line and "w4-channel" in line
    ]
    assert first == last


def test_another_error_is_not_taken_for_memory(model, words, monkeypatch):
    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(measure, "perplexity", failing)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        main(["quantize", str(model), *words])


class TestDeployment:
    @pytest.fixture(autouse=True)
    def _torchao(self) -> None:
        pytest.importorskip("torchao")

    @pytest.mark.parametrize(
        ("form", "changes"),
        [
            ("int8-weight-only", {}),
            ("int8-dynamic", {}),
            ("int8-dynamic-tensor", {"normalizer": "key-value", "mlp_rotation": "hadamard"}),
        ],
    )
    def test_saved_reloaded_generating(self, tokenizer, words, tmp_path, capsys, form, changes):
        # Wide enough for int8 to save more than the file's longer header takes.
        shape = {"hidden_size": 96, "intermediate_size": 160}
        model = _saved(tmp_path / "wide", tokenizer, **shape, **changes)
        out = tmp_path / "few"
        assert _call("quantize", str(model), *words, "--deploy", form, "--output", str(out)) == 0
        shown = capsys.readouterr().out
        assert "loaded and run by a new process" in shown
        assert "tokens a second" in shown
        figures = json.loads((out / "quantization.json").read_text())
        assert figures["form"] == form
        assert figures["bytes"] == (out / "model.safetensors").stat().st_size
        assert figures["bytes"] < figures["bfloat16_bytes"]
        assert "not smaller" not in shown
        assert figures["narrowest_input"] == 96
        assert figures["quantized_layers"] == 14
        assert figures["tokens_per_second"] > 0
        assert figures["perplexity"] == pytest.approx(figures["bfloat16_perplexity"], rel=0.05)
        suffixes = {path.suffix for path in out.iterdir()}
        assert suffixes <= {".json", ".safetensors", ".py", ".jinja"}  # nothing pickled
        assert "Int8Tensor" in _header(out / "model.safetensors")
        sealed = manifest.verify(out, advice="")["files"]
        assert {"model.safetensors", "quantization.json"} <= sealed.keys()

        # It generates, and is not quantised again.
        assert _call("generate", str(out), "attention", "--tokens", "3") == 0
        assert "already quantised (torchao)" in _refusal(capsys, str(out), *words)
        again = ("--deploy", form, "--output", str(tmp_path / "again"))
        assert "already quantised" in _refusal(capsys, str(out), *words, *again)
        assert "exists" in _refusal(
            capsys, str(model), *words, "--deploy", form, "--output", str(out)
        )

    def test_a_model_that_came_out_no_smaller_says_so(self, model, words, tmp_path, capsys):
        out = tmp_path / "few"  # 24 wide: the file's longer header takes more than int8 saves
        options = ("--deploy", "int8-weight-only", "--output", str(out))
        assert _call("quantize", str(model), *words, *options) == 0
        shown = capsys.readouterr().out
        (line,) = [line for line in shown.splitlines() if line.startswith("not smaller")]
        assert "inputs as few as 24" in line
        assert "a wider model gains" in line
        figures = json.loads((out / "quantization.json").read_text())
        assert figures["bytes"] >= figures["bfloat16_bytes"]

    def test_why_int4_is_not_smaller(self):
        found = {"bytes": 2_601_640, "bfloat16_bytes": 1_393_864, "narrowest_input": 128}
        found |= {"form": "int4-weight-only"}
        line = not_smaller(found)
        assert "pads every layer's inputs to a multiple of 1,024, and here some have 128" in line
        assert "int8-weight-only pads nothing" in line
        assert not_smaller(found | {"bytes": 400_000}) is None

    def test_a_saved_model_that_is_another_is_refused(
        self, model, words, tmp_path, capsys, monkeypatch
    ):
        monkeypatch.setattr(
            "clearhead.experiments.deployment.continued_elsewhere", lambda *_: [0, 0]
        )
        options = ("--deploy", "int8-weight-only", "--output", str(tmp_path / "few"))
        assert "do not use it" in _refusal(capsys, str(model), *words, *options)

    def test_a_new_process_that_fails_is_said(self, model, words, tmp_path, capsys, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        (tmp_path / "transformers.py").write_text("raise ImportError('broken here')")
        options = ("--deploy", "int8-weight-only", "--output", str(tmp_path / "few"))
        assert "broken here" in _refusal(capsys, str(model), *words, *options)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has 4-bit products")
    def test_int4_without_the_hardware(self, model, words, tmp_path, capsys):
        options = ("--deploy", "int4-weight-only", "--output", str(tmp_path / "few"))
        assert "compute capability 8.0" in _refusal(capsys, str(model), *words, *options)
        assert not (tmp_path / "few").exists()

    def test_conv1d_is_refused(self, words, tmp_path, capsys, tokenizer):
        folder = tmp_path / "gpt2"
        architectures.make("GPT-2").save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        options = ("--deploy", "int8-weight-only", "--output", str(tmp_path / "few"))
        message = _refusal(capsys, str(folder), *words, *options)
        assert "torchao would quantise nothing" in message
        assert not (tmp_path / "few").exists()

    def test_options_without_effect(self, model, tmp_path, capsys):
        given = ("--deploy", "int8-dynamic")
        out = ("--output", str(tmp_path / "few"))
        assert "--output" in _refusal(capsys, str(model), *given)
        assert "--deploy and --output" in _refusal(capsys, str(model), *out)
        for option in ("--scheme", "--records", "--page", "--choices"):
            message = _refusal(capsys, str(model), *given, *out, option, "w4-channel")
            assert f"{option} would have no effect" in message


def _header(path: Path) -> str:
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")].decode()


def test_without_torchao_the_extra_is_named(model, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    options = ("--deploy", "int8-weight-only", "--output", str(tmp_path / "few"))
    assert "clearhead[torchao]" in _refusal(capsys, str(model), *words, *options)
