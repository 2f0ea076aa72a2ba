"""The Hugging Face hub, asked once whether it answers before a model is opened by its name there.

Where it does not, huggingface_hub tries again for half a minute at each file of the model.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from clearhead.errors import ClearheadError
from clearhead.terminal import say

_PAUSES = (0, 1, 2)  # seconds before each attempt: a look-up of the address may fail once
_BELIEVED = 60  # seconds for which an answer counts, so that a command asks once
_CONFIG = "config.json"
_known = dict[str, tuple[float, str | None]]()  # when a name was asked for, and what failed


@contextmanager
def reachable(name: str) -> Iterator[None]:
    """Open a model of a hub that does not answer from the cache alone.

    Folders, and all names in huggingface_hub's offline mode, are left to transformers.

    Raises:
        ClearheadError: where the hub does not answer, and the cache has no such model.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(name).exists() or constants.HF_HUB_OFFLINE or (reason := _silence(name)) is None:
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
    from huggingface_hub import try_to_load_from_cache

    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) is None:
        return True
    here = "/" in name and Path(name).parent.is_dir()
    return here and not isinstance(try_to_load_from_cache(name, _CONFIG), str)


def _silence(name: str) -> str | None:
    """The reason why the hub does not answer; None where it does.

    A thread waits, as a look-up of the address and a connection to each of several have no limit
    in common.
    """
    from huggingface_hub import constants

    asked, reason = _known.get(name, (-_BELIEVED, None))
    if time.monotonic() - asked < _BELIEVED:
        return reason
    limit = constants.HF_HUB_ETAG_TIMEOUT
    found: list[str | None] = [f"nothing within {limit} s; HF_HUB_ETAG_TIMEOUT sets another limit"]
    thread = Thread(target=_attempt, args=(name, limit, found), daemon=True)
    thread.start()
    thread.join(limit)
    _known[name] = time.monotonic(), found[-1]
    return found[-1]


def _attempt(name: str, limit: float, found: list[str | None]) -> None:
    """Add the error of each of a few requests; None as soon as one is answered, be it with a no."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    for pause in _PAUSES:
        time.sleep(pause)
        reason = None
        try:
            # Longer than is waited for it: no answer within the limit is told as that alone.
            get_hf_file_metadata(hf_hub_url(name, _CONFIG), timeout=2 * limit)
        except ValueError:  # no name at all: transformers explains
            pass
        except Exception as error:  # of the network: its errors share no base class
            if not isinstance(error, HfHubHTTPError) or error.response.status_code >= 500:
                reason = " ".join(str(error).split()) or type(error).__name__
        found.append(reason)
        if reason is None:
            return
