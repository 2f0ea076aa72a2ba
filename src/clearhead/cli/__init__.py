"""The command line: verbs only. Nothing heavy is imported until a verb is chosen."""

import importlib
import logging
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

from clearhead import extensions, terminal
from clearhead.allocator import keep_freed_memory
from clearhead.errors import ClearheadError, NotFinite, Stopped, choose

# verb, a module of its own -> one line of help
VERBS = {
    "demo": "defects and repairs, shown in five minutes",
    "compare": "train presets on the same tokens, measure, report",
    "train": "train one model",
    "reproduce": "a paper's experiment, at a scale",
    "finetune": "a checkpoint on GLUE, Banking-77, or labelled texts",
    "eval": "perplexity, retrieval, hallucination by length",
    "diagnose": "sinks, outliers, order and rank of any model",
    "check": "is attention computed as a model's configuration says?",
    "view": "attention of one text, on a page to click through",
    "generate": "continue a text",
    "report": "records to a page that opens offline",
    "quantize": "what few bits cost a model; models in few bits",
    "convert": "models of transformers as clearhead ones, and back",
    "plan": "memory, FLOPs and time of a training run",
    "bench": "speed, as ratios to named peers in one run",
}
USAGE = """clearhead: four repairs of the Transformer, to build, train, measure and compare

usage: clearhead VERB [options]     (clearhead VERB --help lists a verb's options)

{}

--import PACKAGE, with any verb, imports mechanisms and presets of your own first"""

# transformers imports torchao where it is installed, and torchao logs what the machine lacks.
for _chatty in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_chatty).setLevel(logging.ERROR)


def main(arguments: list[str] | None = None) -> None:
    """Run one verb; exits with 0, or with 2 and one line for a request that cannot be met."""
    words = sys.argv[1:] if arguments is None else arguments
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        terminal.open_streams()
        code = _run(words)
        terminal.flush()
    except ClearheadError as error:
        if error.printed_elsewhere:
            time.sleep(1)  # torchrun ends every process once one has failed: the other prints first
            raise SystemExit(2) from error
        code = _fail(str(error), code=1 if isinstance(error, NotFinite) else 2)
    except Stopped as stop:
        terminal.say(str(stop))
        code = stop.code
    except BrokenPipeError:
        code = 0  # the reader, such as `head`, had enough
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        code = _fail(f"{named}{error.strerror or error}")
    except UnicodeError as error:
        code = _fail(f"a text or a file name is not UTF-8 ({error}): give another")
    except KeyboardInterrupt:
        code = _fail("interrupted", code=130)
    except Exception as error:  # a fault of clearhead, or of a library with this input
        if os.environ.get("CLEARHEAD_TRACEBACK"):
            raise
        fault = f"{type(error).__name__}: {error}"
        code = _fail(f"{fault}: a fault, which CLEARHEAD_TRACEBACK=1 shows in full")
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    raise SystemExit(code or 0)


def _run(words: list[str]) -> Any:
    words = extensions.taken_from(words)
    if not words or words[0] in ("-h", "--help"):
        verbs = "\n".join(f"  {verb:9}  {summary}" for verb, summary in VERBS.items())
        terminal.show(USAGE.format(verbs))
        return 0 if words else 2
    if words[0] == "--version":
        from clearhead import __version__

        terminal.show(f"clearhead {__version__}")
        return 0
    verb = choose("verb", words[0], VERBS)
    if verb != "train" and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ClearheadError(f"{verb} runs in one process: start it without torchrun")
    keep_freed_memory()
    module = importlib.import_module(f"clearhead.cli.{verb}")
    from clearhead.cli.options import parse

    try:
        default = module.default(words[1:]) if hasattr(module, "default") else None
        command = parse(module, words[1:], default=default)
    except ClearheadError as error:  # of every process of torchrun: a machine's first prints it
        error.printed_elsewhere = os.environ.get("LOCAL_RANK", "0") != "0"
        raise
    except SystemExit as stop:  # of help
        return stop.code
    return module.run(command)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Answer Ctrl-C. Within an import the process ends: libraries that import others in a `try`
    take a KeyboardInterrupt for a missing module, or swallow it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"clearhead: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _fail(message: str, *, code: int = 2) -> int:
    print(terminal.printable(f"clearhead: {' '.join(message.split())}"), file=sys.stderr)
    return code
