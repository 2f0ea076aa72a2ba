"""An attention implementation that replaces a model's own inside a context.

transformers' models look their attention function up by name in `AttentionInterface` at every
call, and the function that makes its mask in `AttentionMaskInterface`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from clearhead.errors import ClearheadError

State = TypeVar("State")


class AttentionOverride(Generic[State]):
    """A registered attention implementation, for one model at a time.

    Args:
        name: its key in transformers' interface.
        attend: a function of the interface, which may read `state`.
        home: the package whose contexts it works in, for error messages.
    """

    def __init__(self, name: str, attend: Callable[..., tuple[Tensor, Any]], *, home: str) -> None:
        self._name, self._home = name, home
        self._now: tuple[State, str] | None = None
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, self._mask)

    def entered(self) -> tuple[State, str]:
        """The state that the context was entered with; the implementation that it replaces."""
        if self._now is None:
            raise ClearheadError(
                f"attention implementation {self._name!r} works only inside {self._home}'s "
                "contexts: call model.set_attn_implementation('sdpa')"
            )
        return self._now

    @contextmanager
    def within(self, model: Any, state: State, *, busy: str, refusal: str) -> Iterator[State]:
        """Set this implementation in the body, and the model's own again afterwards.

        Raises:
            ClearheadError: `busy` within another such context, `refusal` where the model does not
                look its attention up.
        """
        if self._now is not None:
            raise ClearheadError(busy)
        original = model.config._attn_implementation
        self._now = state, original
        try:
            model.set_attn_implementation(self._name)
            if model.config._attn_implementation != self._name:
                raise ClearheadError(refusal)
            yield state
        finally:
            self._now = None
            model.set_attn_implementation(original)

    def _mask(self, *arguments: Any, **options: Any) -> Any:
        """The mask that the original implementation would have been given."""
        original = ALL_MASK_ATTENTION_FUNCTIONS.get(self.entered()[1])
        return None if original is None else original(*arguments, **options)
