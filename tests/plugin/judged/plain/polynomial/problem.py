"""A polynomial, term by term."""

import numpy as np


def inputs(bench):
    draw = np.random.default_rng(bench.seed)
    return draw.random(40), draw.random(4000) + 0.5


def reference(coefficients, x):
    total = np.zeros_like(x)
    for power, coefficient in enumerate(coefficients):
        term = np.full_like(x, coefficient)
        for _ in range(power):
            term = term * x
        total = total + term
    return total
