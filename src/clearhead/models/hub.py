"""The Hugging Face hub, asked once whether it answers before a model is opened by its name there.

Where it does not, huggingface_hub tries again for half a minute at each file of the model.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import get_session

from clearhead.errors import ClearheadError
from clearhead.terminal import say

_CONFIG = "config.json"


@contextmanager
def reachable(name: str) -> Iterator[None]:
    """Open a model of a hub that does not answer from the cache alone.

    Folders, and all names in huggingface_hub's offline mode, are left to transformers.

    Raises:
        ClearheadError: where the hub does not answer, and the cache has no such model.
    """
    if Path(name).exists() or constants.HF_HUB_OFFLINE:
        yield
        return
    reason = _silence(constants.ENDPOINT)
    if reason is None:
        yield
        return
    if not isinstance(try_to_load_from_cache(name, _CONFIG), str):
        raise ClearheadError(
            f"{name!r} is neither a folder nor in the cache, and {constants.ENDPOINT} does not "
            f"answer ({reason}): give a folder, or try again with a network"
        )
    say(f"{constants.ENDPOINT} does not answer ({reason}): {name} is opened from the cache")
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


def is_path(name: str) -> bool:
    """True of what can be no name of the hub's, or begins with a folder that is here and is no
    model that the hub's cache holds."""
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) is None:
        return True
    here = "/" in name and Path(name).parent.is_dir()
    return here and not isinstance(try_to_load_from_cache(name, _CONFIG), str)


@cache
def _silence(address: str) -> str | None:
    """The reason why a hub does not answer; None where it does, be it with a no."""
    try:
        status = get_session().head(address, timeout=constants.HF_HUB_ETAG_TIMEOUT).status_code
    except Exception as error:  # of the network: its errors share no base class
        return " ".join(str(error).split()) or type(error).__name__
    return f"status {status}" if status >= 500 else None
