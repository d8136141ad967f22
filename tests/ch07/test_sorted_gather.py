"""Gathering with indices that are sorted once beats gathering with random ones, sort included.

There are 25 tables of 64 Mi floats, and one array of 32 Mi random indices. A call sums, for each
table, the elements that the indices select: the same indices for all 25 tables. With random
indices, each 4-byte element takes a sector of 32 bytes, and a lone sector costs a DRAM access of 64
bytes, as in test_coalesced_copy.py. If only the sum is wanted, the order of the elements is free.
With sorted indices the lanes of a warp read neighboring elements and share sectors, and a table is
read about once from start to end. The kernel is the same in both arms. The library arm counts each
index and multiplies the tables by the counts, which only a sum allows. On H200s it takes 2 to 4 %
less time than the optimized arm.

The optimized arm sorts the indices once in each call and uses them for all of the tables. A program
that reads a fixed set of rows in many steps could do the same. Where the layout is free, an array
with the 25 values of a row side by side is the better remedy: a random index then brings 100 useful
bytes. Sorting is for tables that come one after the other, such as the states of a simulation. The
sort is a radix sort (CUB, through torch.sort, which returns a permutation as well). On an H200 it
takes two fifths of the optimized arm's time, so the gain depends on the number of tables. The limit
is one read of the indices and of the tables' sectors that they touch; the kernel reads the indices
again for each table, a third of its bytes.
"""

import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]
SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"


def tables(bench: Bench) -> Tables:
    count = bench.size(25, check=3)  # how often the indices are used
    rows, n = bench.size(2**26, check=70_001), bench.size(2**25 - 5, check=13_315)
    values = torch.rand(count, rows, device=bench.device)
    indices = torch.randint(rows, (n,), dtype=torch.int32, device=bench.device)
    # without a factor of its own, each sum would be nearly the same for all seeds
    values *= torch.rand(count, 1, device=bench.device) + 0.5
    return values, indices, torch.empty(count, device=bench.device), count, rows, n


def in_fp64(values, indices, *_):
    return torch.stack([table[indices.long()].sum(dtype=torch.float64) for table in values])


def counted(values, indices, out, *_):
    counts = torch.zeros(values.shape[1], device=values.device)
    counts.index_add_(0, indices, torch.ones_like(indices, dtype=torch.float32))
    return torch.mv(values, counts, out=out)


def test_sorted_gather(compare: Compare, nvcc: Nvcc) -> None:
    gather_sum = nvcc("ch07/gather_sum.cu")["gather_sum"]

    def sorted_once(values, indices, *rest):
        gather_sum(values, indices.sort().values, *rest)

    compare(
        baseline=gather_sum,
        optimized=sorted_once,
        library=counted,
        against="idiomatic",
        inputs=tables,
        work=lambda values, indices, out, count, rows, n: Work(
            # the expected number of sectors of 8 elements that n random indices touch
            read=indices.nbytes + values.nbytes * (1 - (1 - 8 / rows) ** n),
            written=out.nbytes,
        ),
        reference=in_fp64,
        evidence=[
            evidence.counter(SECTORS, max=0.5, per="baseline"),
            evidence.counter("dram__bytes.sum", max=0.6, per="baseline"),
        ],
    )
