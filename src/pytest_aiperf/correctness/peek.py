"""Reads a few elements of a result as soon as the clock has stopped, to see if they change later.

An arm could leave its work to code that runs between the clock and the copy of the result, such as
a hook or a library function that it has replaced. This module therefore calls nothing that an arm
can replace without writing to the harness's memory: it compares types by identity, and calls only
methods of types that cannot be changed.
"""

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

POSITIONS: Final = 8  #: Elements of each value that are read in addition to the first and the last.
MAX_DEPTH: Final = 8  #: Most levels of nested containers that are opened.
_type, _len = type, len
_ARRAYS: Final = np.ndarray, np.memmap
_CONTAINERS: Final = list, tuple, dict
_PLAIN: Final = float, int, complex, bool, str, bytes
_shape_of, _element_of = np.ndarray.shape.__get__, np.ndarray.item


class Peek:
    """Reads a few elements of one call's values; create it before the clock starts."""

    def __init__(self, rng: random.Random, *, reads: bool = True) -> None:
        drawn = [rng.getrandbits(62) for _ in range(POSITIONS)]
        self._positions = [0, -1, *drawn] if reads else []
        self._found: list[tuple[Callable[[Any, Any], Any], Any, Any, Any]] = []
        torch = sys.modules.get("torch")
        self._tensors = (torch.Tensor, torch.nn.Parameter) if torch else ()
        self._base: Any = torch and torch._C.TensorBase  # noqa: SLF001
        self._sparse = (torch.sparse_coo,) if torch else ()
        self._compressed = (
            (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
            if torch
            else ()
        )

    def read(self, values: Sequence[object]) -> None:
        """Read elements of arrays, and of lists, tuples and dicts, nested ones included.

        The elements of a sparse tensor are the values that it stores. Other objects, and tensors
        that are not in host memory, are left out.
        """
        for value in values:
            for position in self._positions:
                self._read(value, position)

    def has_changed(self) -> bool:
        """Whether an element differs from what was read; NaN does not differ from NaN."""
        for element, value, at, before in self._found:
            now = element(value, at)
            if now is not before and now != before and (now == now or before == before):  # noqa: PLR0124
                return True
        return False

    def _read(self, value: Any, position: int) -> None:
        for _ in [None] * MAX_DEPTH:
            kind = _type(value)
            if _is_one_of(kind, _ARRAYS):
                self._note(_element_of, value, _indices(_shape_of(value), position))
            elif _is_one_of(kind, self._tensors) and self._base.is_cpu.__get__(value):
                self._note(self._element_of_tensor, value, position)
            if not _is_one_of(kind, _CONTAINERS) or not (count := _len(value)):
                return
            at = position % count
            if kind is dict:
                at = [*value][at]
                if _type(at) is not str:  # other keys may have code of their own
                    return
            self._note(_item_of, value, at)
            value = value[at]

    def _note(self, element: Callable[[Any, Any], Any], value: Any, at: Any) -> None:
        try:
            seen = element(value, at)
        except Exception:  # noqa: BLE001  there is no such element: in a nested tensor, for example
            return
        if _is_one_of(_type(seen), _PLAIN):
            self._found.append((element, value, at, seen))

    def _element_of_tensor(self, value: Any, position: int) -> Any:
        dense = self._dense(value)
        at = _indices(self._base.shape.__get__(dense), position)
        return self._base.item(self._base.__getitem__(dense, at))

    def _dense(self, value: Any) -> Any:
        """Return a tensor, or the stored values of a sparse tensor, whose indexing takes long."""
        layout = self._base.layout.__get__(value)
        if _is_one_of(layout, self._sparse):
            return self._base._values(value)  # noqa: SLF001  values() needs a coalesced one
        return self._base.values(value) if _is_one_of(layout, self._compressed) else value


def _is_one_of(kind: object, kinds: Sequence[object]) -> bool:
    for each in kinds:  # noqa: SIM110  any() could have been replaced
        if kind is each:
            return True
    return False


def _item_of(values: Any, at: Any) -> Any:
    return values[at]


def _indices(shape: Sequence[int], position: int) -> tuple[int, ...]:
    """Return the indices of a position in an array, or () if the array has no elements."""
    indices: list[int] = []
    for size in shape:
        if not size:
            return ()
        indices.append(position % size)
        position //= size
    return (*indices,)
