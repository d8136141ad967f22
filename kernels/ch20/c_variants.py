"""Variants of a small matrix product in C, and two searches for the fastest of them.

A variant is a loop order, a number of rows that are computed together, and a tile of the inner
dimension. Two more are wrong (they leave out the rows that do not fill a group), which an oracle
must find. `exhaustive` times every variant often; `halving` times all of them once, and gives four
times the calls to the better quarter, again and again: bad variants are cheap to recognise.
"""

import ctypes
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

CALLS = 16  # of a variant, in the end


@dataclass(frozen=True, slots=True)
class Variant:
    order: str  # of the two inner loops
    rows: int
    tile: int
    tail: bool = True  # whether the last rows are computed, if they do not fill a group

    @property
    def name(self):
        return f"{self.order}_{self.rows}_{self.tile}_{'tail' if self.tail else 'wrong'}"

    @property
    def text(self):
        rows = range(self.rows)
        lines = {
            "jk": "for (int j = 0; j < n; ++j) {"
            + "".join(f"float s{r} = c[(i + {r}) * n + j];" for r in rows)
            + "for (int p = first; p < last; ++p) {"
            + "".join(f"s{r} += a[(i + {r}) * n + p] * b[p * n + j];" for r in rows)
            + "}"
            + "".join(f"c[(i + {r}) * n + j] = s{r};" for r in rows)
            + "}",
            "kj": "for (int p = first; p < last; ++p) {"
            + "".join(f"const float f{r} = a[(i + {r}) * n + p];" for r in rows)
            + "for (int j = 0; j < n; ++j) {"
            + "".join(f"c[(i + {r}) * n + j] += f{r} * b[p * n + j];" for r in rows)
            + "}}",
        }
        single = (
            f"for (int i = n / {self.rows} * {self.rows}; i < n; ++i) for (int p = first; p < last;"
            " ++p) for (int j = 0; j < n; ++j) c[i * n + j] += a[i * n + p] * b[p * n + j];"
        )
        return f"""
void {self.name}(const float* restrict a, const float* restrict b, float* restrict c, int n) {{
    for (int i = 0; i < n * n; ++i) c[i] = 0;
    for (int first = 0; first < n; first += {self.tile}) {{
        const int last = first + {self.tile} < n ? first + {self.tile} : n;
        for (int i = 0; i + {self.rows} <= n; i += {self.rows}) {self.lines(lines)}
        {single if self.tail else ""}
    }}
}}
"""

    def lines(self, lines):
        return "{" + lines[self.order] + "}"


START = Variant("jk", 1, 1 << 20)
VARIANTS = [
    *(Variant(*knobs) for knobs in product(("jk", "kj"), (1, 4), (32, 64, 128, 1 << 20))),
    *(Variant(order, 4, 64, tail=False) for order in ("jk", "kj")),
]


@cache
def _library():
    compiler = os.environ.get("CC", "cc")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "variants.c"), Path(folder, "variants.so")
        source.write_text("".join(v.text for v in {START, *VARIANTS}))
        command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))  # stays mapped when its file is gone


def arm(variant):
    """Make a function that writes ``a @ b`` into ``out``, all float32 and square."""
    function = getattr(_library(), variant.name)

    def run(a, b, out):
        function(*(ctypes.c_void_p(x.ctypes.data) for x in (a, b, out)), len(a))

    return run


def right(variants, a, b):
    """Leave out the variants whose product is not the oracle's."""
    want = a.astype(float) @ b.astype(float)
    kept = []
    for variant in variants:
        out = np.full_like(a, np.nan)
        arm(variant)(a, b, out)
        if np.allclose(out, want, rtol=1e-4, atol=1e-4 * np.abs(want).max()):
            kept.append(variant)
    return kept


def _fastest_of(variant, calls, a, b, out):
    best = float("inf")
    for _ in range(calls):
        begun = time.perf_counter()
        arm(variant)(a, b, out)
        best = min(best, time.perf_counter() - begun)
    return best


def halving(variants, a, b):
    """Return the fastest variant, and how many timed calls it took to find it."""
    out, calls, spent = np.empty_like(a), 1, 0
    while len(variants) > 1:
        times = {v: _fastest_of(v, calls, a, b, out) for v in variants}
        spent += calls * len(variants)
        variants = sorted(variants, key=times.get)[: max(1, len(variants) // 4)]
        calls *= 4
    return variants[0], spent


def exhaustive_calls(variants):
    return CALLS * len(variants)
