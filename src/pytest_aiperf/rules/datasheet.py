"""Peak rates from NVIDIA's datasheets, under the names of the ceilings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_PCIE_5 = 64e9  # 16 lanes, one direction

_MATRIX = {"fp64": 67e12, "fp32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12}
_HOPPER = {**_MATRIX, "fp8": 1979e12, "int8": 1979e12, **dict.fromkeys(("h2d", "d2h"), _PCIE_5)}


def _sheet(memory: float, link: float = 0.0, **others: float) -> Mapping[str, float]:
    # datasheets add both directions of a link; a copy uses one
    links = {"p2p": link / 2, "p2p_both": link} if link else {}
    return {"copy": memory, "read": memory, **links, **others}


DATASHEET: Final[Mapping[str, Mapping[str, float]]] = {
    "a100": _sheet(
        2.04e12, 600e9, fp64=19.5e12, fp32=19.5e12, tf32=156e12, bf16=312e12, fp16=312e12,
        int8=624e12, h2d=32e9, d2h=32e9,
    ),
    "h100": _sheet(3.35e12, 900e9, **_HOPPER),
    "h200": _sheet(4.8e12, 900e9, **_HOPPER),
    "b200": _sheet(
        8e12, 1.8e12, fp64=40e12, fp32=80e12, tf32=1.13e15, bf16=2.25e15, fp16=2.25e15,
        fp8=4.5e15, int8=4.5e15, h2d=_PCIE_5, d2h=_PCIE_5,
    ),
    # its datasheets disagree on int8 and on the number of PCIe lanes: both are left out
    "b300": _sheet(
        8e12, 1.8e12, fp64=1.3e12, fp32=80e12, tf32=1.25e15, bf16=2.5e15, fp16=2.5e15, fp8=5e15,
    ),
    # the only matrix rate that NVIDIA states is sparse FP4
    "gb10": _sheet(301e9, fp32=31e12),
}  # fmt: skip
"""Rate by GPU key and ceiling, in units per second: dense, without sparsity.

Where datasheets differ, the larger figure.
"""
