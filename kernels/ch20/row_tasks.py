"""Five operations on long rows, as source code of Triton kernels that a search can vary.

A variant is a number of passes over the row, a tile, a number of warps, and whether loads and
stores have cache hints. With several passes a kernel first computes the statistics of the row, such
as its maximum and its sum, and then reads the row again for the result. With one pass the whole row
is one tile and stays in registers. The hints are eviction priorities in the L2 cache: evict_last
for a row that is read again, evict_first for what is not.

Each of TASKS is a task for examples/kernel_search.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import layer_norm, rms_norm

HEAD = """import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(x, out, columns, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, TILE)
"""

LOOP = """    for start in range(0, columns, TILE):
        valid = start + column < columns
        value = tl.load(x + row + start + column, mask=valid, other={padding}{hint})
"""

STORE = """        tl.store(out + row + start + column, {result}, mask=valid{hint})
"""

WHOLE_ROW = """    valid = column < columns
    value = tl.load(x + row + column, mask=valid, other={padding}{hint})
"""

STORE_ROW = """    tl.store(out + row + column, {result}, mask=valid{hint})
"""

HINTS = {
    "": "",
    "again": ', eviction_policy="evict_last"',
    "once": ', eviction_policy="evict_first"',
}
"""What a load or a store says about its data: nothing, read again, or not needed again."""

TAIL = """

def run(x):
    out, tile = torch.empty_like(x), {tile}
    _kernel[(len(x),)](x, out, x.shape[1], tile, num_warps={warps})
    return out
"""

CACHING = """

CACHE = {}
compute = run


def run(x):
    if x.data_ptr() not in CACHE:
        CACHE[x.data_ptr()] = compute(x)
    return CACHE[x.data_ptr()]
"""

PROMPT = """\
Write a faster Triton kernel for {name} over the rows (16384 columns) of an fp32 matrix on the GPU.
Answer with one Python module in a ```python block. It has a function run(x) that returns a new
tensor. Every answer is checked against fp64 on fresh data."""

Statistic = tuple[str, str, str]
"""What is done before, in and after the loop of one pass."""


@dataclass(frozen=True)
class RowTask:
    """An operation that maps each row to a row of the same length."""

    function: Callable[[torch.Tensor], torch.Tensor]
    name: str
    padding: str
    """The value of columns beyond the end of a row."""
    passes: tuple[tuple[Statistic, ...], ...]
    """The statistics of a variant with several passes; the first variant is the start."""
    whole_row: str
    """The same statistics for a row in registers."""
    result: str
    mistake: tuple[str, str, str]
    """The name of a wrong variant, and what to replace in the one with a single pass."""
    formula: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The operation with elementary functions, for a reference that shares no code with others."""

    @property
    def START(self) -> str:  # noqa: N802  a constant of the task modules that a search accepts
        """Return the source code of the variant to beat."""
        return self.variant()[1]

    @property
    def PROMPT(self) -> str:  # noqa: N802  as above
        """Return the task in words."""
        return PROMPT.format(name=self.name)

    def variant(self, passes=None, tile=1024, warps=4, hints=False):
        """Return the name and the source code of a variant, by default of the start."""
        passes = passes or len(self.passes[0]) + 1
        first, last = "", ""
        if passes == 1:
            last, tile = WHOLE_ROW + self.whole_row + STORE_ROW, "row"
            tile_source = "triton.next_power_of_2(x.shape[1])"
        else:
            statistics = next(loops for loops in self.passes if len(loops) + 1 == passes)
            tile_source = tile
            for before, inside, after in statistics:
                first += indented(before, 4) + LOOP + indented(inside, 8) + indented(after, 4)
            last = LOOP + STORE
        values = {"padding": self.padding, "result": self.result}
        body = first.format(**values, hint=HINTS["again" if hints else ""])
        body += last.format(**values, hint=HINTS["once" if hints else ""])
        source = HEAD + body + TAIL.format(tile=tile_source, warps=warps)
        return f"passes={passes}, tile={tile}, warps={warps}" + ", hints" * hints, source

    def generations(self, history):
        """Yield lists of names and sources: a coordinate search around the best variant so far.

        Two of the first list are wrong and must be rejected: a typical mistake, and cached results.
        With the hints come two variants of the shape that torch.compile generates: two passes with
        large tiles, the second of which finds the row in the L2 cache.
        """
        name, right, wrong = self.mistake
        others = [
            (f"wrong: {name}", self.variant(1)[1].replace(right, wrong)),
            ("wrong: cached results", self.START + CACHING),
        ]
        most = len(self.passes[0]) + 1
        best, speedup = {"passes": most, "tile": 1024, "warps": 4, "hints": False}, 1
        knobs = {
            "passes": range(most - 1, 0, -1),
            "warps": (8, 16, 32),
            "hints": (True,),
            "tile": (4096, 8192),
        }
        for knob, values in knobs.items():
            if knob == "tile" and best["passes"] == 1:
                continue  # with one pass the tile is always the row
            variants = [best | {knob: value} for value in values]
            if knob == "hints":
                two_passes = {"passes": 2, "warps": 16, "hints": True}
                variants += [two_passes | {"tile": tile} for tile in (2048, 4096)]
            yield [*others, *(self.variant(**variant) for variant in variants)]
            others = []
            for variant, judged in zip(variants, history[-len(variants) :], strict=True):
                if (judged.speedup or 0) > speedup:
                    best, speedup = variant, judged.speedup

    def inputs(self, bench):
        """Draw values that overflow an exponential, with positive and negative means of rows."""
        rows, columns = bench.size(4096, check=3), bench.size(16384, check=2500)
        sign = 1 - torch.arange(rows, device=bench.device) % 2 * 2
        return 30 * (torch.randn(rows, columns, device=bench.device) + sign[:, None])

    def reference(self, x):
        """Compute the result in fp64."""
        return (self.formula or self.function)(x.double())


def exponentials(x):
    return torch.exp(x - x.amax(1, keepdim=True))


def indented(lines, columns):
    return "".join(f"{' ' * columns}{line}\n" for line in lines.splitlines())


ZEROS = "{} = tl.zeros((TILE,), tl.float32)"
ONLINE = """new_max = tl.maximum(row_max, tl.max(value, 0))
total = total * tl.exp(row_max - new_max) + tl.sum(tl.exp(value - new_max), 0)
row_max = new_max"""
MEAN_AND_VARIANCE = """mean = tl.sum(total, 0) / columns
variance = tl.sum(squares, 0) / columns - mean * mean"""
MAXIMUM_AND_SUM = (
    (
        (
            'row_max = tl.full((TILE,), -float("inf"), tl.float32)',
            "row_max = tl.maximum(row_max, value)",
            "row_max = tl.max(row_max, 0)",
        ),
        (ZEROS.format("total"), "total += tl.exp(value - row_max)", "total = tl.sum(total, 0)"),
    ),
    (
        (
            'row_max = -float("inf")\ntotal = 0.0',
            ONLINE,
            "",
        ),
    ),
)
WHOLE_MAXIMUM_AND_SUM = """    row_max = tl.max(value, 0)
    total = tl.sum(tl.exp(value - row_max), 0)
"""

TASKS = {
    "softmax": RowTask(
        lambda x: torch.softmax(x, 1),
        "softmax",
        '-float("inf")',
        MAXIMUM_AND_SUM,
        WHOLE_MAXIMUM_AND_SUM,
        "tl.exp(value - row_max) / total",
        ("no maximum", " - row_max", ""),
        lambda x: exponentials(x) / exponentials(x).sum(1, keepdim=True),
    ),
    "log_softmax": RowTask(
        lambda x: torch.log_softmax(x, 1),
        "log_softmax",
        '-float("inf")',
        MAXIMUM_AND_SUM,
        WHOLE_MAXIMUM_AND_SUM,
        "value - row_max - tl.log(total)",
        ("no maximum", " - row_max", ""),
        lambda x: x - x.amax(1, keepdim=True) - exponentials(x).sum(1, keepdim=True).log(),
    ),
    "layer_norm": RowTask(
        lambda x: layer_norm(x, x.shape[1:]),
        "layer_norm without weights",
        "0",
        (
            (
                (ZEROS.format("total"), "total += value", "mean = tl.sum(total, 0) / columns"),
                (
                    ZEROS.format("squares"),
                    "centered = tl.where(valid, value - mean, 0)\nsquares += centered * centered",
                    "variance = tl.sum(squares, 0) / columns",
                ),
            ),
            (
                (
                    ZEROS.format("total") + "\n" + ZEROS.format("squares"),
                    "total += value\nsquares += value * value",
                    MEAN_AND_VARIANCE,
                ),
            ),
        ),
        """    mean = tl.sum(value, 0) / columns
    centered = tl.where(valid, value - mean, 0)
    variance = tl.sum(centered * centered, 0) / columns
""",
        "(value - mean) * tl.rsqrt(variance + 1e-5)",
        ("padding counts", "tl.where(valid, value - mean, 0)", "value - mean"),
    ),
    "rms_norm": RowTask(
        lambda x: rms_norm(x, x.shape[1:], eps=1e-6),
        "rms_norm without weights",
        "0",
        (
            (
                (
                    ZEROS.format("squares"),
                    "squares += value * value",
                    "mean_square = tl.sum(squares, 0) / columns",
                ),
            ),
        ),
        "    mean_square = tl.sum(value * value, 0) / columns\n",
        "value * tl.rsqrt(mean_square + 1e-6)",
        ("padding counts", "/ columns", "/ TILE"),
    ),
    "absmax": RowTask(
        lambda x: x / x.abs().amax(1, keepdim=True),
        "division by the largest magnitude of the row",
        "0",
        (
            (
                (
                    ZEROS.format("largest"),
                    "largest = tl.maximum(largest, tl.abs(value))",
                    "largest = tl.max(largest, 0)",
                ),
            ),
        ),
        "    largest = tl.max(tl.abs(value), 0)\n",
        "value / largest",
        ("no magnitude", "tl.abs(value)", "value"),
    ),
}
