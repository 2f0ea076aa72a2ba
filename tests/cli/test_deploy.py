"""clearhead quantize --deploy: what it saves, that a new process runs it, and how it refuses."""

import json
import sys
from pathlib import Path

import pytest
import tests_architectures as architectures
import torch
from transformers import AutoModelForCausalLM

from clearhead.experiments.saving import deploy, in_words
from clearhead.models.loading import load
from clearhead.records import manifest

from .conftest import call, refusal, saved


def test_a_speed_above_a_thousand_is_written_out():
    figures = {"bytes": 2_000, "tokens_per_second": 1123.4, "perplexity": 9.0}
    assert in_words(figures, "") == "2,000 bytes, 1,123 tokens/s, perplexity 9.00"


class TestDeployment:
    @pytest.fixture(autouse=True)
    def _torchao(self) -> None:
        pytest.importorskip("torchao")

    @pytest.mark.parametrize(
        ("form", "changes"),
        [
            ("int8-weight-only", {}),
            ("int8-dynamic-tensor", {"normalizer": "key-value", "mlp_rotation": "hadamard"}),
        ],
    )
    def test_saved_reloaded_generating(self, tokenizer, windows, tmp_path, capsys, form, changes):
        # Wide enough for int8 to save more than the file's longer header takes.
        shape = {"hidden_size": 96, "intermediate_size": 160}
        model = saved(tmp_path / "wide", tokenizer, **shape, **changes)
        out = tmp_path / "few"
        capsys.readouterr()
        assert call("quantize", str(model), *windows, "--deploy", form, "--output", str(out)) == 0
        shown, said = capsys.readouterr()
        assert "Writing model shards" not in said
        assert "loaded and run by a new process" in shown
        assert "tokens/s" in shown
        figures = json.loads((out / "quantization.json").read_text())
        assert figures["form"] == form
        assert figures["bytes"] == (out / "model.safetensors").stat().st_size
        assert figures["bytes"] < figures["bfloat16_bytes"]
        assert figures["tokens_per_second"] > 0
        assert figures["perplexity"] == pytest.approx(figures["bfloat16_perplexity"], rel=0.05)
        suffixes = {path.suffix for path in out.iterdir()}
        assert suffixes <= {".json", ".safetensors", ".py", ".jinja"}  # nothing pickled
        assert "Int8Tensor" in _header(out / "model.safetensors")
        sealed = manifest.verify(out, advice="")["files"]
        assert {"model.safetensors", "quantization.json"} <= sealed.keys()

        # It generates, and is not quantised again.
        assert call("generate", str(out), "attention", "--tokens", "3") == 0
        assert "already quantised (torchao)" in refusal(capsys, "quantize", str(out), *windows)
        again = ("--deploy", form, "--output", str(tmp_path / "again"))
        assert "already quantised" in refusal(capsys, "quantize", str(out), *windows, *again)
        assert "exists" in refusal(
            capsys, "quantize", str(model), *windows, "--deploy", form, "--output", str(out)
        )

    def test_the_one_in_bfloat16_is_as_transformers_opens_it(self, llama, tmp_path):
        """Rotary frequencies stay in float32."""
        load_ = {"dtype": torch.bfloat16, "device_map": "cpu"}
        model, tokenizer = load(str(llama))
        few = tmp_path / "few"
        _, peer = deploy(model, tokenizer, str(llama), "int8-weight-only", few, load_)
        wanted = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).eval()
        ids = torch.randint(300, (1, 64))
        with torch.no_grad():
            assert torch.equal(peer(ids).logits, wanted(ids).logits)

    def test_a_model_and_its_repair_side_by_side(self, tokenizer, windows, tmp_path, capsys):
        plain = saved(tmp_path / "plain", tokenizer)
        repaired = saved(tmp_path / "repaired", tokenizer, mlp_rotation="hadamard")
        out, form = tmp_path / "both", "int8-dynamic"
        options = ("--deploy", form, "--output", str(out))
        models = (str(plain), str(repaired))
        for more in (("--records", str(tmp_path / "r.jsonl")), ("--page", "both.html")):
            assert f"{more[0]} would have no effect" in refusal(
                capsys, "quantize", *models, *windows, *options, *more
            )
        assert not out.exists()
        assert call("quantize", *models, *windows, *options) == 0
        shown = " ".join(capsys.readouterr().out.split())
        names = [f"{name}-{form}" for name in ("plain", "repaired")]
        assert sorted(path.name for path in out.iterdir()) == sorted(names)
        for name in names:
            figures = json.loads((out / name / "quantization.json").read_text("utf-8"))
            assert f"{figures['bytes']:,} bytes, " in shown
            assert f"in bfloat16 {figures['bfloat16_bytes']:,} bytes, " in shown
        assert "exists" in refusal(capsys, "quantize", *models, *windows, *options)

    def test_a_saved_model_that_is_another_is_refused(
        self, model, windows, tmp_path, capsys, monkeypatch
    ):
        monkeypatch.setattr("clearhead.experiments.saving.continuations", lambda *_: [[0, 0]])
        options = ("--deploy", "int8-weight-only", "--output", str(tmp_path / "few"))
        assert "do not use it" in refusal(capsys, "quantize", str(model), *windows, *options)

    def test_conv1d_is_refused(self, windows, tmp_path, capsys, tokenizer):
        folder = tmp_path / "gpt2"
        architectures.make("GPT-2").save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        options = ("--deploy", "int8-weight-only", "--output", str(tmp_path / "few"))
        message = refusal(capsys, "quantize", str(folder), *windows, *options)
        assert "torchao quantises nothing" in message
        assert not (tmp_path / "few").exists()

    def test_options_without_effect(self, model, tmp_path, capsys):
        given = ("--deploy", "int8-dynamic")
        out = ("--output", str(tmp_path / "few"))
        assert "--output" in refusal(capsys, "quantize", str(model), *given)
        assert "--deploy and --output" in refusal(capsys, "quantize", str(model), *out)
        for option in ("--scheme", "--records"):
            message = refusal(capsys, "quantize", str(model), *given, *out, option, "w4-channel")
            assert f"{option} would have no effect" in message


def _header(path: Path) -> str:
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")].decode()


def test_without_torchao_the_extra_is_named(model, windows, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    options = ("--deploy", "int8-weight-only", "--output", str(tmp_path / "few"))
    assert "clearhead[torchao]" in refusal(capsys, "quantize", str(model), *windows, *options)
