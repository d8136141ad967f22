"""Filters in C that copy the elements below a limit, with and without a branch."""

import ctypes

import numpy as np

from kernels import host_c

SOURCE = r"""
// Copy the elements of x below the limit to out, in order; return how many there are.

int branching(const float* x, int n, float limit, float* out) {
    int count = 0;
    for (int i = 0; i < n; ++i)
        if (x[i] < limit) out[count++] = x[i];  // the compiler must not store what is not kept
    return count;
}

int branchless(const float* x, int n, float limit, float* out) {
    int count = 0;
    for (int i = 0; i < n; ++i) {
        out[count] = x[i];        // always stored; the next element overwrites it
        count += x[i] < limit;    // unless it is kept
    }
    return count;
}
"""


def select(name, x, limit):
    """Return the elements of ``x`` below ``limit``, which the C function ``name`` selects."""
    out = np.empty_like(x)
    x_pointer, out_pointer = host_c.pointers(x, out)
    function = getattr(host_c.build(SOURCE), name)
    return out[: function(x_pointer, len(x), ctypes.c_float(limit), out_pointer)]
