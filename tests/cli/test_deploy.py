"""clearhead quantize --deploy: what it saves, that a new process runs it, and how it refuses."""

import json
import sys
from pathlib import Path

import pytest
import tests_architectures as architectures

from clearhead.records import manifest

from .conftest import call, refusal, saved

FORM = ("--deploy", "int8-dynamic-tensor")


def _header(path: Path) -> str:
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")].decode()


@pytest.mark.usefixtures("_torchao")
class TestDeployment:
    @pytest.fixture
    def _torchao(self) -> None:
        pytest.importorskip("torchao")

    def test_a_repaired_model_is_saved_reloaded_and_generates(
        self, tokenizer, windows, tmp_path, capsys
    ):
        """Two at once: tests/cli/test_repair_tutorial.py."""
        # Wide enough for int8 to save more than the file's longer header takes.
        shape = {"hidden_size": 96, "intermediate_size": 160}
        repair = {"normalizer": "key-value", "mlp_rotation": "hadamard"}
        model = saved(tmp_path / "repaired", tokenizer, **shape, **repair)
        few = tmp_path / "few"
        options = (*windows, *FORM, "--output", few)
        capsys.readouterr()
        assert call("quantize", model, *options) == 0
        shown, said = capsys.readouterr()
        assert "Writing model shards" not in said
        assert "loaded and run by a new process" in shown
        shown = " ".join(shown.split())
        figures = json.loads((few / "quantization.json").read_text("utf-8"))
        assert figures["form"] == FORM[1]
        assert figures["bytes"] == (few / "model.safetensors").stat().st_size
        assert figures["bytes"] < figures["bfloat16_bytes"]
        assert figures["tokens_per_second"] > 0
        assert figures["perplexity"] == pytest.approx(figures["bfloat16_perplexity"], rel=0.05)
        assert f"{figures['bytes']:,} bytes, " in shown
        assert f"in bfloat16 {figures['bfloat16_bytes']:,} bytes, " in shown
        suffixes = {path.suffix for path in few.iterdir()}
        assert suffixes <= {".json", ".safetensors", ".py", ".jinja"}  # nothing pickled
        assert "Int8Tensor" in _header(few / "model.safetensors")
        sealed = manifest.verify(few, advice="")["files"]
        assert {"model.safetensors", "quantization.json"} <= sealed.keys()
        # It generates, and is not quantised again.
        assert call("generate", few, "attention", "--tokens", "3") == 0
        assert "already quantised (torchao)" in refusal(capsys, "quantize", few, *windows)
        again = (*FORM, "--output", str(tmp_path / "again"))
        assert "already quantised" in refusal(capsys, "quantize", few, *windows, *again)
        assert "exists" in refusal(capsys, "quantize", model, *options)

    def test_conv1d_is_refused(self, windows, tmp_path, capsys, tokenizer):
        folder = tmp_path / "gpt2"
        architectures.make("GPT-2").save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        options = (*FORM, "--output", str(tmp_path / "few"))
        message = refusal(capsys, "quantize", str(folder), *windows, *options)
        assert "torchao quantises nothing" in message
        assert not (tmp_path / "few").exists()

    def test_options_without_effect(self, model, tmp_path, capsys):
        out = ("--output", str(tmp_path / "few"))
        assert "--output" in refusal(capsys, "quantize", str(model), *FORM)
        assert "--deploy and --output" in refusal(capsys, "quantize", str(model), *out)
        for option in ("--scheme", "--records", "--page"):
            message = refusal(capsys, "quantize", str(model), *FORM, *out, option, "w4-channel")
            assert f"{option} has no effect" in message


def test_without_torchao_the_extra_is_named(model, windows, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    options = (*FORM, "--output", str(tmp_path / "few"))
    assert "clearhead[torchao]" in refusal(capsys, "quantize", str(model), *windows, *options)
