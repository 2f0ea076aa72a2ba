"""Convert a model of transformers to a clearhead model, or back, and check that the logits are the
same. Or give it other mechanisms (--to), and print its distance from the original. A run's
checkpoint becomes an ordinary folder of the same model.

examples:
  clearhead convert ./SmolLM2-135M ./smollm2-clearhead
  clearhead convert ./SmolLM2-135M ./smollm2-sink --to sink --calibrate ./books
  clearhead convert ./SmolLM2-135M ./few-bits --prefix auto --rotate down --calibrate ./books
  clearhead convert runs/train/final ./served --for serving
  clearhead convert runs/train/final ./for-llama-cpp --for llama.cpp
"""

from clearhead.lab.sweep_configs import ConvertConfig as Command
from clearhead.terminal import show


def run(command: Command) -> int:
    from clearhead.lab.converting import run_conversion

    for line in run_conversion(command):
        show(line)
    return 0
