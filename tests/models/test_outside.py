"""A mechanism and a preset of another package: importing it is all that it takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OUTSIDE = Path(__file__).parents[1] / "outside"

LIFE = """
import sys, torch
import louder_heads
import clearhead
from clearhead.models import plan
assert "louder" in clearhead.presets()
config = clearhead.preset("louder", hidden_size=16, num_attention_heads=4, num_hidden_layers=2,
                          intermediate_size=24, vocab_size=31)
assert config.requires == ["louder_heads"]
assert clearhead.preset("transformer").requires is None
model = clearhead.ClearheadForCausalLM(config).eval()
assert plan(config).parameters == sum(p.numel() for p in model.parameters())
ids = torch.arange(12).view(2, 6)
model(ids, labels=ids).loss.backward()
gains = [layer.self_attn.epilogue.gain for layer in model.model.layers]
assert all((gain.grad != 0).all() for gain in gains)
with torch.no_grad():
    for gain in gains:
        gain.normal_()
    model.save_pretrained(sys.argv[1])
    again = clearhead.ClearheadForCausalLM.from_pretrained(sys.argv[1]).eval()
    assert torch.equal(again(ids).logits, model(ids).logits)
try:
    clearhead.preset("louder", num_attention_heads=1)
except clearhead.ClearheadError as error:
    assert "two heads or more" in str(error)
"""

ALONE = """
import sys, clearhead
try:
    clearhead.ClearheadForCausalLM.from_pretrained(sys.argv[1])
except clearhead.ClearheadError as error:
    print(error)
from clearhead.models.loading import load
try:
    load(sys.argv[1])
except clearhead.ClearheadError as error:
    print(error)
"""


def _python(code: str, folder: Path) -> str:
    paths = [str(OUTSIDE), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_lives_with_the_package_and_names_it_without(tmp_path):
    _python(LIFE, tmp_path)
    lines = _python(ALONE, tmp_path).splitlines()
    assert (
        lines == ["this model has mechanisms of the package 'louder_heads': import that first"] * 2
    )


@pytest.mark.parametrize("package", ["\x1b[2J\nrm", ["x"], 1], ids=str)
def test_a_name_in_a_configuration_reaches_no_terminal_unescaped(package):
    from clearhead import ClearheadConfig, ClearheadError

    with pytest.raises(ClearheadError, match="import that first") as error:
        ClearheadConfig(requires=[package])
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("register(Declaration(axis='epilog', name='x', **WORDS))", "did you mean epilogue"),
        ("register(Declaration(axis='epilogue', name='gate', **WORDS))", "clearhead's already"),
        ("register_preset('xsa', {}, '')", "clearhead's: choose another name"),
        ("register_preset('y', {}, '', {'huge': {}})", "unknown size 'huge'"),
    ],
)
def test_what_is_taken_or_unknown_is_refused_in_one_line(code, message):
    from clearhead import ClearheadError, register, register_preset
    from clearhead.spec import Declaration

    words = {"summary": "", "source": "", "build": object}
    names = {"register": register, "register_preset": register_preset}
    with pytest.raises(ClearheadError, match=message) as error:
        exec(code, {"__name__": "theirs", "Declaration": Declaration, "WORDS": words, **names})
    assert "\n" not in str(error.value)
