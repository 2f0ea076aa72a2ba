"""Run README's own example and commands, at toy size, with the Python that runs this file."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
CLEARHEAD = str(Path(sys.executable).with_name("clearhead"))


def run(*command: str) -> None:
    print("$", " ".join(command)[:200], flush=True)
    subprocess.run(command, check=True, cwd=FOLDER)


with tempfile.TemporaryDirectory() as name:
    FOLDER = Path(name)
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    run(CLEARHEAD, "--version")
    run(sys.executable, "-c", example)
    toy = ["--data.data", str(README), "--train.tokens", "4096", "--set", "num_hidden_layers=1"]
    run(CLEARHEAD, "compare", "transformer", "sas-p", "--seeds", "0", *toy, "--output", "mine")
    run(CLEARHEAD, "train", "differential", *toy, "--output", "run")
    run(CLEARHEAD, "generate", "run/final", "All the world", "--tokens", "8")
