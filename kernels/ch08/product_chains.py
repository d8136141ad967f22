"""The product of an array in C, as one chain of multiplications or as several independent ones."""

import ctypes

from kernels import host_c

CHAINS = {"one": 1, "two": 2, "four": 4, "eight": 8}
SCALAR = ("-fno-tree-vectorize", "-fno-tree-slp-vectorize")
"""Flags that keep the compiler from computing several chains in one SIMD instruction."""

SOURCE = r"""
// Multiply n numbers, n a multiple of COUNT; number i belongs to chain i % COUNT. The chains are
// variables of their own, so that each stays in a register.
#define CHAIN(k) if (COUNT > k) p##k *= x[i + k];
#define PRODUCT(name, count)                                                                   \
    double name(const double* x, int n) {                                                      \
        enum { COUNT = count };                                                                \
        double p0 = 1, p1 = 1, p2 = 1, p3 = 1, p4 = 1, p5 = 1, p6 = 1, p7 = 1;                 \
        for (int i = 0; i < n; i += COUNT) {                                                   \
            CHAIN(0) CHAIN(1) CHAIN(2) CHAIN(3) CHAIN(4) CHAIN(5) CHAIN(6) CHAIN(7)            \
        }                                                                                      \
        return ((p0 * p1) * (p2 * p3)) * ((p4 * p5) * (p6 * p7));                              \
    }
PRODUCT(one, 1)
PRODUCT(two, 2)
PRODUCT(four, 4)
PRODUCT(eight, 8)
"""


def geometric_mean(name, factors):
    """Return the geometric mean, with the product of the C function ``name``."""
    function = getattr(host_c.build(SOURCE, *SCALAR), name)
    function.restype = ctypes.c_double
    return function(*host_c.pointers(factors), len(factors)) ** (1 / len(factors))
