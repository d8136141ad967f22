"""The product of an array in C, as one chain of multiplications or as several independent ones.

Each function passes over the array several times in one call, so that the array comes from the L1
cache and the call itself takes little of the time. The chains run on through all passes.

one, two, four, eight   Number i belongs to chain i % COUNT. Multiplications are scalar.
simd                    Sixteen chains, which the compiler multiplies with SIMD instructions.
"""

import ctypes

from kernels import host_c

CHAINS = {"one": 1, "two": 2, "four": 4, "eight": 8}
SCALAR = ("-fno-tree-vectorize", "-fno-tree-slp-vectorize")
"""Flags that keep the compiler from computing several chains in one SIMD instruction."""

SOURCE = r"""
// Multiply n numbers, n a multiple of COUNT, in each pass. The chains are variables of their own,
// so that each stays in a register.
#define CHAIN(k) if (COUNT > k) p##k *= x[i + k];
#define PRODUCT(name, count)                                                                   \
    double name(const double* x, int n, int passes) {                                          \
        enum { COUNT = count };                                                                \
        double p0 = 1, p1 = 1, p2 = 1, p3 = 1, p4 = 1, p5 = 1, p6 = 1, p7 = 1;                 \
        for (int pass = 0; pass < passes; ++pass)                                              \
            for (int i = 0; i < n; i += COUNT) {                                               \
                CHAIN(0) CHAIN(1) CHAIN(2) CHAIN(3) CHAIN(4) CHAIN(5) CHAIN(6) CHAIN(7)        \
            }                                                                                  \
        return ((p0 * p1) * (p2 * p3)) * ((p4 * p5) * (p6 * p7));                              \
    }
PRODUCT(one, 1)
PRODUCT(two, 2)
PRODUCT(four, 4)
PRODUCT(eight, 8)
"""

SIMD_SOURCE = r"""
// n is a multiple of 16. Vectors of two are GCC's and Clang's extension of C; each is a register.
typedef double pair __attribute__((vector_size(16), aligned(8)));

double simd(const double* x, int n, int passes) {
    pair p[8];
    for (int k = 0; k < 8; ++k) p[k] = (pair){1, 1};
    for (int pass = 0; pass < passes; ++pass)
        for (int i = 0; i < n; i += 16)
            for (int k = 0; k < 8; ++k) p[k] *= *(const pair*)(x + i + 2 * k);
    for (int k = 1; k < 8; ++k) p[0] *= p[k];
    return p[0][0] * p[0][1];
}
"""


def geometric_mean(name, factors, passes):
    """Return the geometric mean, with the product of the C function ``name``."""
    library = host_c.build(SIMD_SOURCE) if name == "simd" else host_c.build(SOURCE, *SCALAR)
    function = getattr(library, name)
    function.restype = ctypes.c_double
    product = function(*host_c.pointers(factors), len(factors), passes)
    return product ** (1 / (len(factors) * passes))
