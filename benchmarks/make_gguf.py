"""A folder as GGUF in bf16, Q8_0 and Q4_0, for benchmarks.servers; runs without clearhead.

Usage: python make_gguf.py LLAMA_CPP FOLDER STEM

LLAMA_CPP is the folder of its sources, where its converter is. Writes STEM-bf16.gguf and so on.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])
sys.path.insert(0, f"{sys.argv[1]}/gguf-py")

import llama_cpp
from conversion.base import TextModel

LLAMA_CPP, FOLDER, STEM = sys.argv[1:]
# Words are split as GPT-2's wherever the converter does not know a tokenizer by its hash.
known: Any = TextModel.get_vocab_base_pre


def split(self: Any, tokenizer: Any) -> str:
    try:
        return str(known(self, tokenizer))
    except NotImplementedError:
        return "gpt-2"


TextModel.get_vocab_base_pre = split
for kind in ("bf16", "f32"):
    sys.argv[1:] = [FOLDER, "--outfile", f"{STEM}-{kind}.gguf", "--outtype", kind]
    runpy.run_path(f"{LLAMA_CPP}/convert_hf_to_gguf.py", run_name="__main__")
whole = Path(f"{STEM}-f32.gguf")
for kind in ("Q8_0", "Q4_0"):
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.nthread = 1
    out = f"{STEM}-{kind.lower()}.gguf"
    if llama_cpp.llama_model_quantize(str(whole).encode(), out.encode(), options):
        raise RuntimeError(f"llama.cpp wrote no {out}")
whole.unlink()
