"""Parameters that are read outside `forward`, in a model whose weights lie elsewhere between calls.

With a `device_map` that offloads, accelerate brings a module's own parameters for the time of its
`forward`, by a hook. A method that reads them beside it needs the hook as well.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def with_own_parameters(method: Method) -> Method:
    """The method of a module, its parameters in place while it runs."""

    @wraps(method)
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        hook = getattr(self, "_hf_hook", None)
        if hook is None:
            return method(self, *arguments, **options)
        hook.pre_forward(self)
        return hook.post_forward(self, method(self, *arguments, **options))

    return run  # type: ignore[return-value]
