"""Matrix multiplication as three nested loops in C, in two loop orders, called through ctypes."""

from kernels import host_c

SOURCE = r"""
// c (m x n) = a (m x k) * b (k x n), all row-major

void jki(const float* a, const float* b, float* c, int m, int k, int n) {
    for (int i = 0; i < m * n; ++i) c[i] = 0;
    for (int j = 0; j < n; ++j)
        for (int p = 0; p < k; ++p)
            for (int i = 0; i < m; ++i) c[i * n + j] += a[i * k + p] * b[p * n + j];  // stride n
}

void ikj(const float* a, const float* b, float* c, int m, int k, int n) {
    for (int i = 0; i < m * n; ++i) c[i] = 0;
    for (int i = 0; i < m; ++i)
        for (int p = 0; p < k; ++p)
            for (int j = 0; j < n; ++j) c[i * n + j] += a[i * k + p] * b[p * n + j];  // stride 1
}
"""


SCALAR = "-fno-tree-vectorize", "-fno-tree-slp-vectorize"
"""Compiler flags for scalar code."""


def multiply(order, a, b, out, *, vectorize=True):
    """Write ``a @ b`` into ``out``; all three are C-contiguous float32 arrays."""
    # without restrict the pointers may alias, so the compiler cannot interchange the loops
    function = getattr(host_c.build(SOURCE, *(() if vectorize else SCALAR)), order)
    function(*host_c.pointers(a, b, out), *a.shape, b.shape[1])
