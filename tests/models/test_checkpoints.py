"""Save, then load in a clean process: the same bits; mechanisms of another package."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import clearhead
from clearhead import ClearheadForCausalLM, preset
from clearhead.spec import Declaration

from .space import stirred

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}

# The clearhead under test, which need not be the one installed.
SOURCE = str(Path(clearhead.__file__).parents[1])
ENVIRONMENT = {"PATH": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": SOURCE}

READ = """
import sys, torch
{first}
import transformers
from safetensors.torch import save_file
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    auto = getattr(transformers, folder.rpartition("-")[2])
    try:
        model = auto.from_pretrained(folder, {options})
    except ImportError as error:
        print("pip install clearhead" in str(error))
        continue
    with torch.no_grad():
        logits = model.eval()(torch.arange(18).view(2, 9)).logits
    save_file({{"logits": logits}}, folder + "/logits.safetensors")
"""
HIDE = """
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "clearhead":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""
REMOTE = "trust_remote_code=True"


@pytest.mark.parametrize(
    ("first", "options"),
    [("import clearhead.models", ""), ("", REMOTE), (HIDE, REMOTE)],
    ids=["clearhead", "remote-code", "not-installed"],
)
def test_a_clean_process_gives_the_same_bits_or_says_what_to_install(
    first, options, tmp_path, warm
):
    """Also of matrices that are drawn once and never trained: they are in the checkpoint."""
    kinds = [
        (clearhead.ClearheadForMaskedLM, "bert", "AutoModelForMaskedLM"),
        (
            clearhead.ClearheadForSequenceClassification,
            "bert",
            "AutoModelForSequenceClassification",
        ),
    ]
    for name in ("differential", "gpt2", "key-value", "skipless", "sas", "sas-p-nonorm"):
        kinds.append((ClearheadForCausalLM, name, "AutoModelForCausalLM"))
    models = {
        tmp_path / f"{name}-{auto}": stirred(kind(preset(name, **SHAPE)))
        for kind, name, auto in kinds
    }
    for folder, model in models.items():
        model.save_pretrained(folder)
    code = READ.format(first=first, options=options)
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), **ENVIRONMENT}
    done = warm.run("-c", code, *models, env=environment)
    assert done.returncode == 0, done.stderr
    if first == HIDE:
        assert done.stdout.split() == ["True"] * len(models)
        return
    for folder, model in models.items():
        with torch.no_grad():
            want = model(torch.arange(18).view(2, 9)).logits
        assert torch.equal(load_file(folder / "logits.safetensors")["logits"], want)


AGAIN = """
import sys
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
for auto in (AutoConfig, AutoModel, AutoModelForCausalLM):
    first, second = sys.argv[1], sys.argv[1] + auto.__name__
    for _ in range(2):
        auto.from_pretrained(first, trust_remote_code=True).save_pretrained(second)
        first, second = second, second + "-again"
"""


def test_a_model_opened_as_remote_code_and_saved_again_brings_no_copy_of_our_code(tmp_path, warm):
    ClearheadForCausalLM(preset("coca", **SHAPE)).save_pretrained(tmp_path / "model")
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), **ENVIRONMENT}
    done = warm.run("-c", AGAIN, tmp_path / "model", env=environment)
    assert done.returncode == 0, done.stderr
    wanted = json.loads((tmp_path / "model" / "config.json").read_text())["auto_map"]
    assert set(wanted.values()) > {"modeling_clearhead.ClearheadConfig"}
    for folder in tmp_path.glob("model*"):
        assert json.loads((folder / "config.json").read_text())["auto_map"] == wanted
        assert [path.name for path in folder.glob("*.py")] == ["modeling_clearhead.py"]
    other = type("Other", (clearhead.ClearheadConfig,), {})  # of a package that brings its code
    other.register_for_auto_class()
    assert (other._auto_class, clearhead.ClearheadConfig._auto_class) == ("AutoConfig", None)


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


def _run(warm, *words, folder=None, **environment):
    """Python in a new process that could import the package."""
    paths = [str(OUTSIDE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths)} | environment
    return warm.run(*words, cwd=folder, env=os.environ | environment)


def test_a_model_lives_with_the_package_and_names_it_without(tmp_path, warm):
    lived, alone = (_run(warm, "-c", code, tmp_path) for code in (LIFE, ALONE))
    assert lived.returncode == alone.returncode == 0, lived.stderr + alone.stderr
    lines = alone.stdout.splitlines()
    message = "this model has mechanisms of the package 'louder_heads': --import that first"
    assert lines == [message] * 2


SET = ("hidden_size=24", "num_hidden_layers=1", "num_attention_heads=2", "intermediate_size=32")
TRAIN = (
    *("--data.data", "synthetic:recall:documents=20", "--data.vocabulary", "300"),
    *("--train.tokens", "64", "--train.sequence-length", "16", "--train.batch-size", "2"),
    *("--set", *SET),
)


@pytest.fixture
def command(tmp_path, warm):
    """Runs a command line in a new process that could import the package, and returns it."""

    def run(*words, **environment):
        cache = {"CLEARHEAD_CACHE": str(tmp_path / "cache")}
        return _run(warm, "-m", "clearhead", *words, folder=tmp_path, **cache, **environment)

    return run


@pytest.mark.parametrize(
    ("words", "variable", "imported"),
    [
        (["--import=one,two", "report", "missing.jsonl"], "", ["one", "two"]),
        (["report", "missing.jsonl", "--import", "two", "--import", "one"], "one", ["one", "two"]),
        (["report", "missing.jsonl"], "two,one", ["two", "one"]),
    ],
)
def test_packages_are_imported_once_by_a_command(words, variable, imported, command, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("print(__name__)\n")
    done = command(*words, CLEARHEAD_IMPORT=variable)
    assert done.stdout.split() == imported
    assert "missing.jsonl" in done.stderr


def test_installed_packages_are_imported_by_their_entry_points(command, tmp_path):
    information = tmp_path / "installed/louder-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: louder\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[clearhead.extensions]\nlouder = louder_heads")
    paths = os.pathsep.join([str(information.parent), str(OUTSIDE), *sys.path])
    done = command("plan", "louder", "--set", *SET, PYTHONPATH=paths)
    assert done.stdout.startswith("louder, hidden_size=24"), done.stderr


def test_a_command_imports_the_package_and_a_run_names_it(command, tmp_path):
    words = ("louder", "transformer", "--import", "louder_heads", *TRAIN)
    done = command("compare", *words, "--output", "compared")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "compared/louder-seed0/run.json").read_text("utf-8"))
    assert " --import louder_heads " in record["command"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "--import", "nowhere"], "cannot import nowhere (ModuleNotFoundError: No module"),
        (["plan", "--import", "broken"], "cannot import broken (ZeroDivisionError: division"),
        (["plan", "--import", "refused"], "the preset 'xsa' is clearhead's: choose another name"),
        (["plan", "--import"], "--import names no package: give one, such as my_package"),
    ],
)
def test_a_package_that_cannot_be_imported_is_one_line(words, message, command, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    preset = "import clearhead\nclearhead.register_preset('xsa', {}, '')\n"
    (tmp_path / "refused.py").write_text(preset)
    done = command(*words)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"clearhead: {message}")


@pytest.mark.parametrize("package", ["\x1b[2J\nrm", ["x"], 1], ids=str)
def test_a_name_in_a_configuration_reaches_no_terminal_unescaped(package):
    with pytest.raises(clearhead.ClearheadError, match="import that first") as error:
        clearhead.ClearheadConfig(requires=[package])
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("axis", "name", "message"),
    [("epilog", "x", "did you mean epilogue"), ("epilogue", "gate", "clearhead's already")],
)
def test_what_is_taken_or_unknown_is_refused(axis, name, message):
    theirs = type("Theirs", (), {"__module__": "theirs"})
    with pytest.raises(clearhead.ClearheadError, match=message):
        clearhead.register(Declaration(axis=axis, name=name, summary="", source="", build=theirs))
