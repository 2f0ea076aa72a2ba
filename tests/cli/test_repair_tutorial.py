"""docs/repair.md from a diagnosis to a server: its commands in order, on a tiny model."""

import random
import re
import shlex
from pathlib import Path

from .conftest import WORDS, call, refusal, saved_llama

PAGE = Path(__file__).parents[2] / "docs/repair.md"
TUTORIAL = PAGE.read_text("utf-8").partition("## From a diagnosis")[2].partition("\n## What to")[0]
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"```\n(.*?)```", TUTORIAL, re.DOTALL)
    for line in block.splitlines()
]
# The page's words that are too large for a test, and what stands for them; names of folders that
# the commands make are the page's own.
TINY = {"250000": "4096", "16": "2"}
SAID = {
    "diagnose SmolLM2-135M --data": r"look most at the first token(.|\n)*page: runs/diagnose/",
    "convert SmolLM2-135M softmax1": r"start: KL 0\.0000(.|\n)*with equal logits: softmax1",
    "train --from softmax1": r"model: repaired/final",
    "train --from SmolLM2-135M": r"model: control/final",
    "diagnose control repaired": r"three numbers(.|\n)*: control (.|\n)*runs/trained",
    "quantize control repaired": r"perplexity(.|\n)*page: bits.html",
    "convert repaired granite": r"GraniteSWAForCausalLM, with equal logits: granite",
    "generate granite": r"Once upon a time.+",
    "convert SmolLM2-135M few-bits": r"prefix '\\n'(.|\n)*logits are those of the first model"
    r"(.|\n)*sink: \S+ → \S+ of queries(.|\n)*largest state: .+ → (.|\n)*8 bits: \S+ → \S+ ",
    "diagnose SmolLM2-135M few-bits": r"few-bits(.|\n)*runs/after",
    "quantize SmolLM2-135M few-bits --data.data": r"page: few-bits.html",
    "convert SmolLM2-135M turned": r"with equal logits: turned",
    "convert turned plain": r"LlamaForCausalLM, with equal logits: plain",
    "quantize plain": r"20 of 20 prompts",
    "generate served": r"Once upon a time.+",
    "quantize SmolLM2-135M few-bits --deploy": r"the saved model is loaded",
    "generate int8/few-bits": r"Once upon a time.+",
}


def test_the_commands_run_in_order_as_written(tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    shape = {"num_hidden_layers": 1, "intermediate_size": 64, "max_position_embeddings": 512}
    saved_llama(Path("SmolLM2-135M"), tokenizer, **shape)
    Path("books").mkdir()
    draw = random.Random(0)
    for index in range(100):
        lines = [" ".join(draw.choices(WORDS, k=12)) for _ in range(90)]
        Path("books", f"{index:03}.txt").write_text("\n".join(lines), "utf-8")
    assert len(COMMANDS) == len(SAID)
    for _, *words in COMMANDS:
        capsys.readouterr()
        assert call(*(TINY.get(word, word) for word in words)) == 0, words
        shown = "".join(capsys.readouterr())
        (said,) = [said for start, said in SAID.items() if " ".join(words).startswith(start)]
        assert re.search(said, shown), shown
    assert "normalizer='key-value' does not fit" in refusal(
        capsys, "convert", "few-bits", "refused", "--for", "serving"
    )
    assert call("train", "--resume", "repaired", "--train.tokens", "6144") == 0
    assert "tokens of the schedule the learning rate stays at" in capsys.readouterr().err
