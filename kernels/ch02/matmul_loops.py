"""Matrix multiplication as three nested loops in C, in two loop orders, called through ctypes."""

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = r"""
// c (m x n) = a (m x k) * b (k x n), all row-major

extern "C" void ijk(const float* a, const float* b, float* c, int m, int k, int n) {
    for (int i = 0; i < m; ++i)
        for (int j = 0; j < n; ++j) {
            float sum = 0;
            for (int p = 0; p < k; ++p) sum += a[i * k + p] * b[p * n + j];  // b: stride n
            c[i * n + j] = sum;
        }
}

extern "C" void ikj(const float* a, const float* b, float* c, int m, int k, int n) {
    for (int i = 0; i < m; ++i) {
        for (int j = 0; j < n; ++j) c[i * n + j] = 0;
        for (int p = 0; p < k; ++p)
            for (int j = 0; j < n; ++j) c[i * n + j] += a[i * k + p] * b[p * n + j];  // b: stride 1
    }
}
"""


@cache
def _library():
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "loops.cpp"), Path(folder, "loops.so")
        source.write_text(SOURCE)
        # without restrict the pointers may alias, so the compiler cannot interchange the loops
        command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))  # the library stays loaded after its file is deleted


def multiply(order, a, b, out):
    """Write ``a @ b`` into ``out``; all three are C-contiguous float32 arrays."""
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (a, b, out))
    getattr(_library(), order)(*pointers, *a.shape, b.shape[1])
