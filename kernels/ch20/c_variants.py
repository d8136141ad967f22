"""Variants of a small matrix product in C, and two searches for the fastest of them.

A variant is a loop order, a number of rows that are computed together (register blocking), and a
tile of the inner dimension (cache blocking). Two more variants are wrong: they skip the rows that
do not fill a group, and the oracle must reject them.

exhaustive  Time all variants equally often.
halving     Successive halving: time all variants once, the faster half twice, the faster half of
            these four times, and so on until one is left.

Of n variants, both make n log2(n) timed calls, if n is a power of two. A variant's time is the
shortest of its calls.
"""

import time
from dataclasses import dataclass
from itertools import product

import numpy as np

from kernels import host_c

UNTILED = 1 << 20
"""A tile larger than any matrix here."""

FUNCTION = """
void {name}(const float* restrict a, const float* restrict b, float* restrict c, int n) {{
    for (int i = 0; i < n * n; ++i) c[i] = 0;
    for (int first = 0; first < n; first += {tile}) {{
        const int last = first + {tile} < n ? first + {tile} : n;
        for (int i = 0; i + {rows} <= n; i += {rows}) {{{body}}}
        {remainder}
    }}
}}
"""

# jk: the sums of one column stay in registers, and b is read with a stride of n
JK = """for (int j = 0; j < n; ++j) {{
            {load}
            for (int p = first; p < last; ++p) {{ {multiply} }}
            {store}
        }}"""

# kj: the inner loop runs along rows of b and c and vectorizes
KJ = """for (int p = first; p < last; ++p) {{
            {load}
            for (int j = 0; j < n; ++j) {{ {multiply} }}
        }}"""

REMAINDER = """for (int i = n / {rows} * {rows}; i < n; ++i)
            for (int p = first; p < last; ++p)
                for (int j = 0; j < n; ++j) c[i * n + j] += a[i * n + p] * b[p * n + j];"""


@dataclass(frozen=True, slots=True)
class Variant:
    """One C function: how it orders and blocks the loops over i, j and p."""

    order: str
    """Of the two inner loops: "jk" or "kj"."""
    rows: int
    """Rows of the result that are computed together."""
    tile: int
    """Steps of the inner dimension between two passes over the result."""
    tail: bool = True
    """Whether the last rows are computed if they do not fill a group; without, it is wrong."""

    @property
    def name(self):
        return f"{self.order}_{self.rows}_{self.tile}_{'tail' if self.tail else 'wrong'}"

    @property
    def source(self):
        if self.order == "jk":
            body = JK.format(
                load=self.for_each_row("float s{r} = c[(i + {r}) * n + j];"),
                multiply=self.for_each_row("s{r} += a[(i + {r}) * n + p] * b[p * n + j];"),
                store=self.for_each_row("c[(i + {r}) * n + j] = s{r};"),
            )
        else:
            body = KJ.format(
                load=self.for_each_row("const float f{r} = a[(i + {r}) * n + p];"),
                multiply=self.for_each_row("c[(i + {r}) * n + j] += f{r} * b[p * n + j];"),
            )
        remainder = REMAINDER.format(rows=self.rows) if self.tail else ""
        shape = {"name": self.name, "tile": self.tile, "rows": self.rows}
        return FUNCTION.format(**shape, body=body, remainder=remainder)

    def for_each_row(self, statement):
        return " ".join(statement.format(r=r) for r in range(self.rows))


VARIANTS = [
    *(Variant(*knobs) for knobs in product(("jk", "kj"), (1, 4), (32, 64, 128, UNTILED))),
    *(Variant(order, 4, 64, tail=False) for order in ("jk", "kj")),
]
SOURCE = "".join(variant.source for variant in VARIANTS)


def arm(variant):
    """Return a function that writes ``a @ b`` into ``out``; all are square float32 matrices."""
    function = getattr(host_c.build(SOURCE), variant.name)

    def run(a, b, out):
        function(*host_c.pointers(a, b, out), len(a))

    return run


def correct(variants, a, b):
    """Return the variants whose product agrees with the oracle's."""
    expected = a.astype(float) @ b.astype(float)
    accepted = []
    for variant in variants:
        out = np.full_like(a, np.nan)
        arm(variant)(a, b, out)
        if np.allclose(out, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max()):
            accepted.append(variant)
    return accepted


def stopwatch(a, b):
    """Return a function that returns the seconds of one call of a variant."""
    out = np.empty_like(a)

    def seconds(variant):
        begin = time.perf_counter()
        arm(variant)(a, b, out)
        return time.perf_counter() - begin

    return seconds


def exhaustive(variants, seconds):
    calls = (len(variants) - 1).bit_length()
    return min(variants, key=lambda variant: min(seconds(variant) for _ in range(calls)))


def halving(variants, seconds):
    calls, shortest = 1, dict.fromkeys(variants, float("inf"))
    while len(variants) > 1:
        for variant in variants:
            shortest[variant] = min(shortest[variant], *(seconds(variant) for _ in range(calls)))
        variants = sorted(variants, key=shortest.get)[: len(variants) // 2]
        calls *= 2
    return variants[0]


def relative_speeds(variants, seconds, calls=64):
    """Return each variant's speed relative to the fastest; the calls of all take turns."""
    times = [[seconds(variant) for variant in variants] for _ in range(calls)]
    shortest = [min(of_variant) for of_variant in zip(*times, strict=True)]
    return {variant: min(shortest) / t for variant, t in zip(variants, shortest, strict=True)}
