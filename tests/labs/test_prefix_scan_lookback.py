"""A prefix sum in one pass: each tile looks back at its predecessors' sums instead of waiting.

The textbook scan runs three kernels (tiles, their sums, adding the sums), and the data pass through
memory four times: read, written, read, written. With decoupled look-back a tile publishes its own
sum at once and adds up those of its predecessors until it meets one that knows its whole prefix;
the values stay in registers meanwhile, so they are read once and written once.

Twice is the limit by the bytes. torch.cumsum, which is CUB's look-back scan, is the library arm and
as fast: what one writes first has this idea in it already. Tiles number themselves in the order in
which they start: otherwise one could wait for a tile that cannot start before it ends. Where all
data fit in the L2 cache, the extra passes cost little.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence


def integers(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    n = bench.size(2**27 - 5, check=10_003)  # the last tile is not whole
    x = torch.randint(-1000, 1000, (n,), dtype=torch.int32, device=bench.device)
    return x, torch.empty_like(x)


@pytest.mark.gpu
def test_prefix_scan_lookback(compare: Compare, nvcc: Nvcc) -> None:
    scan = nvcc("labs/prefix_scan_lookback.cu")

    def arm(name):
        def run(x, out):
            scratch = torch.empty(len(x) // 4096 + 2, dtype=torch.int64, device=x.device)
            scan[name](x, out, scratch, len(x))

        return run

    compare(
        baseline=arm("three_kernels"),
        optimized=arm("look_back"),
        library=lambda x, out: torch.cumsum(x, 0, dtype=torch.int32, out=out),
        against="previous rung",
        inputs=integers,
        work=lambda x, out: Work(bytes=2 * x.nbytes),
        reference=lambda x, out: torch.cumsum(x, 0),
        evidence=[
            evidence.kernels(most=2),  # the scan, and the reset of the states
            evidence.opcode("LD*.64.STRONG.GPU", kernel="scan_look_back"),
            evidence.counter("dram__bytes.sum", most=1.1, per="work"),
        ],
    )
