"""Format figures and columns, the same way in every table, message and report."""

import difflib
import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Final

_Scales = Sequence[tuple[float, str]]

_SMALL: Final[_Scales] = ((1, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))  #: SI prefixes of times.

_LARGE: Final[_Scales] = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))
"""SI prefixes of rates. T is the largest: GPUs are compared in TFLOP/s, even above 1000."""

_BINARY: Final[_Scales] = tuple((2.0 ** (10 * i), f"{p}i") for i, p in enumerate("KMGTPE", 1))[::-1]
"""IEC prefixes (Ki, Mi, ...), for sizes in bytes."""

_RATES: Final = ("B/s", "FLOP/s", "OP/s")
"""Units of rates that take an SI prefix; the unit of a score, such as tok/s, does not."""


def si(value: float, unit: str, digits: int = 4) -> str:
    """Format a value with ``digits`` significant digits and the prefix that suits its size.

    Seconds become ms, µs or ns; rates (B/s, FLOP/s, OP/s) take k to T; bytes take Ki to Ei.
    Other units take no prefix.
    """
    if unit in ("B", "bytes"):
        value, prefix = _scaled(value, (*_BINARY, (1, "")))
        unit = "B"
    else:
        value, prefix = _scaled(value, _SMALL if unit == "s" else _LARGE if unit in _RATES else ())
    # "#" keeps trailing zeros, so that the figures of a column have equally many digits
    figure = f"{value:#.{digits}g}".rstrip(".") if abs(value) < 1000 else f"{value:.0f}"
    return f"{figure} {prefix}{unit}".rstrip()


def short(value: float) -> str:
    """Format the label of an axis tick: 0.5, 2, 100, 3k, 2M."""
    scaled, prefix = _scaled(value, _LARGE)
    return f"{scaled:.4g}{prefix}" if math.isfinite(value) else "-"


def _scaled(value: float, scales: _Scales) -> tuple[float, str]:
    if value == 0 or not math.isfinite(value) or not scales:
        return value, ""
    # four digits of 0.99996 m are those of 1 m: show them so, and not as 1000 µ
    scale, prefix = next((s for s in scales if abs(value) >= 0.99995 * s[0]), scales[-1])
    return value / scale, prefix


def shorten(name: str, width: int = 100) -> str:
    """Cut the middle out of a long name, such as that of a kernel with its template arguments."""
    if len(name) <= width:
        return name
    tail = width // 3  # the start has the function, the end tells specializations apart
    return f"{name[: width - tail - 3]}...{name[-tail:]}"


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the end of a message that suggests the nearest name; "" if none is near."""
    near = difflib.get_close_matches(word, list(names))
    return f"; did you mean {near[0]}?" if near else ""


def no_attribute(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """Return the error for a name that a module does not have, which suggests the nearest one."""
    public = [each for each in names if not each.startswith("_")]
    return AttributeError(f"module {module!r} has no attribute {name!r}{nearest(name, public)}")


def percent(share: float, digits: int = 0) -> str:
    """Format a fraction as a percentage: 0.25 becomes "25 %"."""
    return f"{100 * share:.{digits}f} %"


def pad(rows: Iterable[Sequence[str]], align: str = "<>") -> list[list[str]]:
    """Pad cells to their column's width; a short row gets empty cells.

    ``align`` has one ``<`` or ``>`` per column; its last character applies to all further columns.
    """
    columns = list(zip_longest(*rows, fillvalue=""))
    padded = []
    for side, column in zip(align.ljust(len(columns), align[-1]), columns, strict=False):
        width = max(map(len, column))
        padded.append([f"{cell:{side}{width}}" for cell in column])
    return [list(row) for row in zip(*padded, strict=True)]


def table(rows: Iterable[Sequence[str]], align: str = "<>") -> list[str]:
    """Format rows as lines, with columns two spaces apart; ``align`` as in :func:`pad`."""
    return ["  ".join(row).rstrip() for row in pad(rows, align)]
