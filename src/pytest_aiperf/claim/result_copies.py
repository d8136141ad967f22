"""Copies the results of timed calls before a later call or a late thread can change them."""

import random
from collections.abc import Callable
from typing import Any

from pytest_aiperf.correctness import accuracy, argument_effects, tensors
from pytest_aiperf.correctness.contents import Contents
from pytest_aiperf.correctness.tensors import Args, NamedTensor
from pytest_aiperf.device.device import Device

from .bound_claim import BoundClaim

UNKNOWN = random.SystemRandom()  #: Draws numbers that an arm cannot derive from any seed.
SMALL_BYTES = 1 << 16
"""Results up to this size are copied first. While a larger result is copied, a thread that still
works could write a small one."""


def copy_result(
    bound: BoundClaim, returned: object, args: Args
) -> tuple[list[NamedTensor], list[Contents]]:
    """Copy a call's outputs, and what it has left in its arguments.

    Outputs that the GPU may still write are not copied yet: see :func:`copy_late_outputs`.
    """
    device, effects = bound.device, bound.effects
    outputs = argument_effects.outputs_of(returned, args, effects)
    _copy_chosen(device, outputs, lambda v: _is_small(v) and not _is_late(device, v))
    left = argument_effects.contents_of(args, effects)
    _copy_chosen(device, outputs, lambda v: not _is_small(v) and not _is_late(device, v))
    return outputs, left


def copy_late_outputs(device: Device, outputs: list[NamedTensor]) -> None:
    """Replace the outputs that a GPU may write after timing by copies; call this after timing."""
    _copy_chosen(device, outputs, lambda value: _is_late(device, value))


def _is_late(device: Device, value: object) -> bool:
    """Whether a GPU claim's result is in host memory, which the GPU may write after timing."""
    return bool(device.gpu) and tensors.on_host(value)


def _copy_chosen(
    device: Device, outputs: list[NamedTensor], chosen: Callable[[object], bool]
) -> None:
    """Replace the chosen results by copies.

    The order is random, so that a thread that still works cannot stay ahead of the copies.
    """
    with device.separate_memory():
        for i in UNKNOWN.sample(range(len(outputs)), len(outputs)):
            if chosen(outputs[i][1]):
                outputs[i] = _copy(*outputs[i])


def _copy(path: str, value: object) -> NamedTensor:
    (copy,) = accuracy.copies([(path, value)])
    return copy


def _is_small(value: Any) -> bool:
    if tensors.backend_of(value):
        return bool(value.nbytes <= SMALL_BYTES)
    return 8 * len(value) <= SMALL_BYTES if tensors.is_number_list(value) else True
