"""Launching each level of a tree from the GPU beats a host round trip per level.

The size of a level is known only when the level above is finished. The host loop copies the count
back, waits, and launches a grid of that size: 20 short levels cost 20 round trips. With dynamic
parallelism ("device_launch") the last block of a level launches the next grid, which starts when
this one has finished (a tail launch). A persistent cooperative grid ("persistent") launches nothing
more and uses grid barriers after each level; it suits trees for which one grid size is good enough.

The claim is judged on wall time. A device-side launch is not free, so levels that run longer than
a host round trip gain little. Launches nest at most 24 deep, and the code must be relocatable
(-rdc=true).
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence, prepared

LEVELS = 20


def tree(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give each node but the root a random parent in the level above; level widths are random."""
    count, device = bench.size(65536, check=200), bench.device
    cuts = 2 + torch.randperm(count - 2)[: LEVELS - 2].sort()[0]
    starts = torch.cat([torch.tensor([0, 1]), cuts]).to(device)
    nodes = torch.arange(1, count, device=device)
    level = torch.searchsorted(starts, nodes, right=True) - 1
    width = starts[level] - starts[level - 1]
    index = (torch.rand(count - 1, device=device, dtype=torch.float64) * width).long()
    parent = starts[level - 1] + torch.minimum(index, width - 1)
    children = parent.argsort().int() + 1
    first = torch.searchsorted(parent.sort()[0], torch.arange(count + 1, device=device))
    return first.int(), children, torch.empty(count, dtype=torch.int32, device=device)


def depths_of(first, children, depths):
    count = len(depths)
    parent = torch.zeros(count, dtype=torch.int64, device=first.device)
    parent[children.long()] = torch.arange(count, device=first.device).repeat_interleave(
        first.diff().long()
    )
    depth, ancestor = torch.zeros_like(parent), torch.arange(count, device=first.device)
    for _ in range(LEVELS):
        depth, ancestor = depth + (ancestor > 0), parent[ancestor]
    return depth


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
        evidence=[evidence.launches(max=0.1, per="baseline")],
    )
