"""A device that torch does not know, named `npy`, whose memory is that of the CPU: PrivateUse1, in Python.

Every tensor stands for one on the CPU, which is found by its storage. Views are copies. Only torch's own operators run on it.
Renaming the backend holds for the whole process, so tests run this in one of its own.
"""

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("npy")
_contents = {}


def wrap(content):
    tensor = torch._C._acc.create_empty_tensor(content.shape, content.dtype)
    content = content.contiguous()  # as the tensor says it is; what is written into a view is lost to others
    _contents[tensor.untyped_storage()._cdata] = (tensor.untyped_storage(), content)
    return tensor


def unwrap(tensor):
    return _contents[tensor.untyped_storage()._cdata][1] if tensor.device.type == "npy" else tensor


def run(op, *args, **kwargs):
    if op.namespace != "aten":
        raise NotImplementedError(f"npy knows nothing of {op}")
    if op is torch.ops.aten._copy_from.default:
        unwrap(args[1]).copy_(unwrap(args[0]))
        return args[1]
    if str(kwargs.get("device", "")).startswith("npy"):
        kwargs["device"] = "cpu"
    tensors = {id(unwrap(x)): x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
    with torch._C._DisableTorchDispatch():
        here = pytree.tree_map_only(torch.Tensor, unwrap, (args, kwargs))
        results = op(*here[0], **here[1])
    return pytree.tree_map_only(torch.Tensor, lambda x: tensors[id(x)] if id(x) in tensors else wrap(x), results)


_library = torch.library.Library("_", "IMPL")
_library.fallback(run, "PrivateUse1")
_aten = torch.library.Library("aten", "IMPL", "PrivateUse1")


# What these are made of elsewhere is an empty result that is resized, which the tensor that stands for it would not notice.
def _plain(op):
    return lambda *args, device=None, **kwargs: wrap(op(*map(_here, args), **kwargs))


def _here(argument):
    return unwrap(argument) if isinstance(argument, torch.Tensor) else argument


for _name in ("arange", "arange.start", "arange.start_step", "abs"):
    _packet, _, _overload = _name.partition(".")
    _aten.impl(_name, _plain(getattr(getattr(torch.ops.aten, _packet), _overload or "default")))
