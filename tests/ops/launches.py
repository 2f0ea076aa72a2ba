"""A count of the kernels that PyTorch's calls start on a GPU, without one."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

from clearhead.ops import packed

# By PyTorch 2.13's sources. Backward: a kernel each for the rows' sums, the gradients, and dq's
# rounding; the efficient kernel in float32 sums rows by three of PyTorch's, and clears what it adds
# to. Not counted: two sums of flash's keys that queries share.
STARTED = {
    "_flash_attention_forward": 1,
    "_flash_attention_backward": 3,
    "_efficient_attention_forward": 1,
    "_efficient_attention_backward": 5,
    "_scaled_dot_product_cudnn_attention": 1,
    "_scaled_dot_product_cudnn_attention_backward": 3,
}
MEMORY = "empty new_empty empty_like empty_strided new_empty_strided"
NOTHING = {*MEMORY.split(), "_unsafe_view", "detach"}
INSIDE = {"clearhead::attend": packed._forward, "clearhead::attend_backward": packed._backward}


class Launches(TorchDispatchMode):
    """Counts kernels, by the name of the call that starts them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name
        if name in INSIDE:
            with self:
                return INSIDE[name]._init_fn(*args, **kwargs)
        with self:  # such as `contiguous`, which copies or does not
            out = function.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        name = name.removeprefix("aten::")
        aliases = [value.alias_info for value in function._schema.returns]
        if name not in NOTHING and not all(x is not None and not x.is_write for x in aliases):
            self.names[name] += STARTED.get(name, 1)
        return function(*args, **kwargs)
