"""Moves inputs that are views of a larger array to memory of their own.

The rest of the larger array is then out of reach. Strides, offsets within a page, and memory that
several inputs share stay as they are. Mapped files, memory that is shared with other processes, and
memory of a GPU that is not torch's are left alone.
"""

import math
import sys
from typing import Any

from . import stored, tensors
from .tensors import Args, backend_of

PAGE = 4096


def give(args: Args) -> Args:
    """Return arguments whose memory holds only their arrays; bytes between them become zero."""
    owners: dict[int, list[Any]] = {}
    sizes: dict[int, int] = {}
    for _, array in tensors.walk(args, "args"):
        if backend_of(array) and math.prod(array.shape) and (owner := _owner(array)):
            address, nbytes = owner
            owners.setdefault(address, []).append(array)
            sizes[address] = max(nbytes, sizes.get(address, 0))
    replaced: dict[int, Any] = {}
    for address, arrays in owners.items():
        distinct = {tensors.view(array): _stored_bytes(array) for array in arrays}
        if sizes[address] > sum(distinct.values()):
            _move(arrays, replaced)
    return _rebuilt(args, replaced) if replaced else args


def _owner(array: Any) -> tuple[int, int] | None:
    """Return address and size of the memory that an array views, if it is another array's."""
    torch = sys.modules.get("torch")
    if torch and isinstance(array, torch.Tensor):
        if array.is_inference() or array.data.is_conj() or array.data.is_neg():
            return None
        storage = array.data.untyped_storage()
        # shared or managed memory, and memory that other GPUs map, is more than a place for values
        is_plain = not array.is_shared() if tensors.on_host(array) else storage.resizable()
        return (storage.data_ptr(), storage.nbytes()) if is_plain else None
    if backend_of(array).module.__name__ != "numpy":
        return None
    while type(array.base) is type(array):
        array = array.base
    if torch and isinstance(array.base, torch.Tensor):
        return _owner(array.base)
    nbytes = array.nbytes
    if stored.is_one_of(type(array.base), (bytes, bytearray)):
        nbytes = max(nbytes, len(array.base))
    elif array.base is not None:
        return None
    return array.ctypes.data, nbytes


def _stored_bytes(array: Any) -> int:
    strides = backend_of(array).address_and_strides(array)[1]
    lengths = [n for n, stride in zip(array.shape, strides, strict=True) if stride]
    return int(math.prod(lengths) * array.itemsize)


def _move(arrays: list[Any], replaced: dict[int, Any]) -> None:
    """Move arrays that share memory to new memory: tensors in place, others into ``replaced``."""
    spans = [tensors.span(array) for array in arrays]
    low = min(start for start, _ in spans)
    nbytes = max(end for _, end in spans) - low + PAGE
    buffer = _zeros(arrays[0], nbytes)
    start, _ = backend_of(buffer).address_and_strides(buffer)
    shift = (low - start) % PAGE - low
    for array in arrays:
        if id(array) in replaced:
            continue
        address, strides = backend_of(array).address_and_strides(array)
        new = _view(buffer, array, address + shift, strides)
        target, source = tensors.stored_elements(new, new), tensors.stored_elements(array, new)
        tensors.as_int_bits(target)[...] = tensors.as_int_bits(source)
        if backend_of(array).module.__name__ == "torch":
            array.data = new
            replaced[id(array)] = array
        else:
            new.flags.writeable = array.flags.writeable
            replaced[id(array)] = new


def _zeros(array: Any, nbytes: int) -> Any:
    module = backend_of(array).module
    if module.__name__ == "numpy":
        return module.zeros(nbytes, module.uint8)
    pinned = array.data.is_pinned()
    return module.zeros(nbytes, dtype=module.uint8, device=array.device, pin_memory=pinned)


def _view(buffer: Any, array: Any, offset: int, strides: tuple[int, ...]) -> Any:
    """View a buffer as an array of the same type, shape and strides."""
    module = backend_of(array).module
    is_numpy = module.__name__ == "numpy"
    if is_numpy != (backend_of(buffer).module.__name__ == "numpy"):  # both share memory
        buffer = buffer.numpy() if is_numpy else module.from_numpy(buffer)
    if is_numpy:
        return module.ndarray(array.shape, array.dtype, buffer, offset, strides)
    new = module.empty(0, dtype=array.dtype, device=array.device)
    return new.set_(
        buffer.untyped_storage(), offset // array.itemsize, array.shape, array.data.stride()
    )


def _rebuilt(value: Any, replaced: dict[int, Any]) -> Any:
    """Return a value with new arrays in place of the old ones; containers stay, but for tuples."""
    if id(value) in replaced:
        return replaced[id(value)]
    items = tensors.children(value) or {}
    new = {suffix: _rebuilt(item, replaced) for suffix, item in items.items()}
    if all(new[suffix] is item for suffix, item in items.items()):
        return value
    if isinstance(value, tuple):
        return tuple.__new__(type(value), new.values())
    tensors.refill(value, dict(value) if isinstance(value, dict) else value, new.values())
    return value
