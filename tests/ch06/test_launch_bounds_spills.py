"""A kernel bounded by its own block size keeps in registers what a bound of 1024 threads spills.

`__launch_bounds__(1024)` makes a kernel safe for every block size: 1024 threads must fit the SM, so
each may use 64 of the SM's 65536 registers. A thread that holds 128 values needs more than 128. The
rest spills to local memory, which is device memory behind the caches. Each thread stores two
kilobytes of spills and loads about as many, where the transform itself moves one kilobyte. In SASS
they are STL and LDL (store and load local): 503 STL in the baseline, none in the optimized arm.
Both arms are launched with blocks of 128 threads, and only the bounds differ.

The optimized arm is bounded by 128, the block size of its launch, and the compiler uses 206
registers. Without any bound it makes the same code, and most kernels have none, so the baseline is
declared naive. Bounds of 1024 are found in libraries whose block size is chosen at run time, or
remain from an earlier launch. A kernel that needs no more than 64 registers loses nothing to them.
Fewer threads are resident than the baseline has, but occupancy serves to hide latency, and 128
independent loads per thread hide it as well. Asking for a third resident block would cap the
registers at 168: that pays off only where latency is exposed and the compiler can save the
registers at no cost. The limit is one read and one write at memory bandwidth.
"""

import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence


def columns(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    count = bench.size(2**20 + 128, check=300)
    a = torch.randn(128, count, device=bench.device)
    return a, torch.empty_like(a), count


def hadamard(a, out, count):
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    matrix = two
    for _ in range(6):
        matrix = torch.kron(matrix, two)
    return matrix.to(a.device) @ a.double()


def test_launch_bounds_spills(compare: Compare, nvcc: Nvcc) -> None:
    transform = nvcc("ch06/walsh_hadamard.cu")
    compare(
        baseline=transform["any_block"],
        optimized=transform["matched"],
        against="naive",  # the fault is the subject
        inputs=columns,
        work=lambda a, out, count: Work(
            read=a.nbytes, written=out.nbytes, flops=7 * a.numel(), dtype="fp32"
        ),
        reference=hadamard,
        evidence=[
            evidence.opcode("STL", kernel="wht_any_block", min=100),
            evidence.opcode("STL", kernel="wht_matched", max=0),
            evidence.spills(kernel="wht_matched"),
            # more than the 64 that 1024 threads can have; two blocks of 128 threads fit the SM
            evidence.registers(min=129, max=255, kernel="wht_matched"),
        ],
    )
