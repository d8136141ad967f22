"""A kernel that launches its successor spares the host a round trip for every level of a tree.

How many nodes a level has is known only when the one above it is done. The host loop copies that
count back, waits, and launches a grid to fit: 20 levels of a few microseconds each cost 20 round
trips. With dynamic parallelism the last block of a level launches the next grid itself, to start
when this one has ended (a tail launch). One cooperative grid that stays, with a barrier after each
level, launches nothing at all; it is shown because it often wins, where a fixed grid will do.

What the caller waits for (wall) is judged. A device-side launch costs some ten microseconds, so
wide levels gain nothing; launches nest 24 deep at most; and the code must be relocatable
(-rdc=true).
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence, prepared

LEVELS = 20


def tree(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give each node but the root a parent in the level above; levels are of random width."""
    count, device = bench.size(65536, check=200), bench.device
    cuts = 2 + torch.randperm(count - 2)[: LEVELS - 2].sort()[0]
    starts = torch.cat([torch.tensor([0, 1]), cuts]).to(device)
    nodes = torch.arange(1, count, device=device)
    level = torch.searchsorted(starts, nodes, right=True) - 1
    width = starts[level] - starts[level - 1]
    lucky = (torch.rand(count - 1, device=device, dtype=torch.float64) * width).long()
    parent = starts[level - 1] + torch.minimum(lucky, width - 1)
    children = parent.argsort().int() + 1
    first = torch.searchsorted(parent.sort()[0], torch.arange(count + 1, device=device))
    return first.int(), children, torch.empty(count, dtype=torch.int32, device=device)


def depths_of(first, children, depths):
    count = len(depths)
    parent = torch.zeros(count, dtype=torch.int64, device=first.device)
    parent[children.long()] = torch.arange(count, device=first.device).repeat_interleave(
        first.diff().long()
    )
    found, at = torch.zeros_like(parent), torch.arange(count, device=first.device)
    for _ in range(LEVELS):
        found, at = found + (at > 0), parent[at]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("rung", ["device_launch", "persistent"])
def test_dynamic_parallelism_fanout(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    expand = nvcc("ch12/dynamic_parallelism_fanout.cu", ["-rdc=true", "-lcudadevrt"])

    def arm(name):
        def make(first, children, depths):
            count = len(depths)
            frontier, pinned = depths.new_empty(2 * count), torch.empty(1, dtype=torch.int32)
            pinned = pinned.pin_memory()
            return lambda *tree: expand[name](*tree, frontier, count, pinned)

        return prepared(make)

    compare(
        baseline=arm("host_loop"),
        optimized=arm(rung),
        inputs=tree,
        reference=depths_of,
        metric="wall",
        cache="warm",
        evidence=[evidence.launches(most=0.1, per="baseline")],
    )
