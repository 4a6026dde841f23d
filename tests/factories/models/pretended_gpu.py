"""A device of its own kind that computes on the CPU, for what a GPU refuses and the CPU does not.

A tensor of it is on another device than those of the CPU: operators refuse to mix the two, as on a GPU. Every wait for
the device is recorded: numbers that are read back, sizes that depend on numbers, copies from memory that is not pinned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from factories.models.emulated_cuda import WAITS, EmulatedCUDA
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

# The one device beside the CPU that every torch has: nothing of it computes but what this file computes for it.
DEVICE = torch.device("meta")
_UNPINNED = "copy to the device from memory that is not pinned"


class PretendedTensor(Tensor):
    """A tensor of the device, computed as `twin`, which is on the CPU."""

    twin: Tensor

    @staticmethod
    def __new__(cls: type[PretendedTensor], twin: Tensor) -> PretendedTensor:
        """Stand for `twin`."""
        # A view of a tensor that was made outside of inference mode has to be as it is.
        with torch.inference_mode(False):
            made = Tensor._make_wrapper_subclass(
                cls, twin.shape, strides=twin.stride(), storage_offset=twin.storage_offset(), dtype=twin.dtype,
                device=DEVICE,
            )  # fmt: skip
        made.twin = twin
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator outside of the mode, where nothing may happen."""
        raise AssertionError(f"{func.name()} runs outside of PretendedGPU.entered")

    def tolist(self) -> Any:
        """Read the numbers back."""
        return self.cpu().tolist()


class _Calls(TorchFunctionMode):
    """Calls that make a tensor of a list below every mode of operators."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make such a tensor on the host, and copy it."""
        kwargs = dict(kwargs or {})
        is_there = args and isinstance(args[0], PretendedTensor)
        if func is Tensor.new_tensor and is_there:
            return self._made(*args[1:], **{"dtype": args[0].dtype, **kwargs})
        if func is torch.tensor and _is_there(kwargs.get("device")):
            del kwargs["device"]
            return self._made(*args, **kwargs)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and is_there:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(self._made(part) if isinstance(part, list) else part for part in index)
            args = (args[0], index, *args[2:])
        return func(*args, **kwargs)

    def _made(self, *args: Any, **kwargs: Any) -> Tensor:
        self._waits.append(_UNPINNED)
        return PretendedTensor(torch.tensor(*args, **kwargs))


class PretendedGPU(TorchDispatchMode):
    """The device, while it is entered. `waits` are the operators that waited for it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Compute tensors of the device in a context."""
        with ExitStack() as stack:
            stack.enter_context(_Calls(self.waits))
            stack.enter_context(self)
            yield

    @contextmanager
    def counting(self) -> Iterator[list[str]]:
        """Yield the waits of the block."""
        before = len(self.waits)
        found: list[str] = []
        yield found
        found += self.waits[before:]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator of any device."""
        kwargs = dict(kwargs or {})
        name = func.name()
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [one for one in given if isinstance(one, PretendedTensor)]
        there = [one for one in given if not isinstance(one, PretendedTensor)]
        assert not any(_is_there(one.device) for one in there), f"{name}: a tensor was made below the modes"
        target = kwargs.get("device")
        if name == "aten::pin_memory":
            found = args[0].clone()
            found.is_pinned_here = True
            return found
        if func._can_decompose():
            # Seen whole in inference mode.
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if name == "aten::_to_copy" and target is not None:
            return self._moved(func, args[0], target, kwargs)
        if name == "aten::copy_" and len(here) == 1:
            return self._copied(func, args, kwargs)
        if here:
            # Numbers without a dimension may come from the host; an index of the host is copied first, which waits.
            wrong = [one for one in there if one.dim()]
            if wrong and name in ("aten::index.Tensor", "aten::index_put_", "aten::index_put") and args[0] in here:
                self.waits.append(f"{name} with an index of the host")
            elif wrong:
                raise RuntimeError(
                    f"{name}: expected all tensors to be on the same device, found the device and the host"
                )
            if name in WAITS or _is_mask_index(name, args):
                self.waits.append(name)
        is_made_here = _is_there(target)
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        if name == "aten::_local_scalar_dense":
            return func(args[0].twin if here else args[0])
        wrappers = {id(one.twin): one for one in here}
        result = func(*tree_map(_twin, args), **tree_map(_twin, kwargs))
        if (not here and not is_made_here) or (target is not None and not is_made_here):
            return result

        def outer(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            # An operator in place returns the tensor that it was given.
            return wrappers.get(id(leaf)) if id(leaf) in wrappers else PretendedTensor(leaf)

        return tree_map(outer, result)

    def _moved(self, func: Any, source: Tensor, target: Any, kwargs: dict[str, Any]) -> Tensor:
        is_here, to_here = isinstance(source, PretendedTensor), _is_there(target)
        kwargs["device"] = torch.device("cpu")
        result = func(_twin(source), **kwargs)
        if to_here:
            if not is_here and not (kwargs.get("non_blocking") and getattr(source, "is_pinned_here", False)):
                self.waits.append(_UNPINNED)
            return PretendedTensor(result)
        if is_here:
            self.waits.append("copy to the host")
        return result

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        target, source = args[:2]
        to_here = isinstance(target, PretendedTensor)
        non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if not to_here:
            self.waits.append("copy to the host")
        elif source.dim() and not (non_blocking and getattr(source, "is_pinned_here", False)):
            self.waits.append(_UNPINNED)
        func(_twin(target), _twin(source))
        return target


def _is_there(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _twin(leaf: Any) -> Any:
    return leaf.twin if isinstance(leaf, PretendedTensor) else leaf


def _is_mask_index(name: str, args: Any) -> bool:
    """True for x[mask]: the number of results depends on the numbers of the mask."""
    return name == "aten::index.Tensor" and any(one is not None and one.dtype is torch.bool for one in args[1])


class PretendedCUDA(EmulatedCUDA):
    """EmulatedCUDA on tensors of the pretended device."""

    @property
    @override
    def torch_device(self) -> torch.device:
        return DEVICE
