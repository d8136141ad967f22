"""Passes over the arms, each with one batch of calls per arm; each batch is timed as a block."""

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_aiperf.device.device import Device
from pytest_aiperf.model import Mode

from .buffers import ArmBuffers


class Batch:
    """Calls of one arm that are timed together."""

    def __init__(
        self, device: Device, arm: ArmBuffers, mode: Mode, order: list[int], keep: int
    ) -> None:
        self.arm, self.order, self.kept_set = arm, order, order[keep]
        self.calls = [arm.call(i) for i in order]
        self.block = device.block(self.calls, mode, keep)

    def clear(self) -> None:
        """Drop the references to the arm's buffers."""
        del self.calls[:]
        self.block.kept = None

    def load(self, order: list[int], keep: int) -> None:
        """Call the sets in this order, and keep the result of call number ``keep``."""
        self.order, self.kept_set, self.block.keep = order, order[keep], keep
        self.calls[:] = map(self.arm.call, order)


@dataclass(frozen=True, slots=True)
class Pass:
    """Blocks of the arms: those of a round, or blocks of other lengths, whose times do not count.

    An arm cannot tell these from blocks of a round, so it does not know which call is the last.
    """

    batches: Mapping[str, Batch]
    is_new: bool  #: Whether each block gets values that no call has met.
    calls: Mapping[str, int] | None = None  #: Calls in each block; None in a round.

    @property
    def is_lone(self) -> bool:
        """Whether each block has a single call."""
        return self.calls is not None and max(self.calls.values()) == 1
