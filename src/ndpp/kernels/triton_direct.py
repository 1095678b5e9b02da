"""Kernels that Triton has compiled, started by the CUDA driver itself: a launch costs the host a third of Triton's own.

Nothing here knows of Triton but what `direct_start` asks of a compiled kernel; where the answer is not the expected one
it returns None, and Triton starts that kernel as ever.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

SLOT = 8  # bytes of an argument; all of them are of 8 bytes or less, and little-endian
FORMATS = {"i32": "i4x", "i64": "q", "fp32": "f4x"}
SCRATCH = 2  # pointers that Triton adds after the arguments of a kernel, null where it asks for no scratch memory
Start = Callable[..., int]


class Direct:
    """A compiled kernel with what its launches have in common. `compiled` is kept: its code goes when it goes."""

    def __init__(self, compiled: Any, formats: Sequence[str], start: Start) -> None:
        self._compiled, self._start = compiled, start
        self._function, self._shared = int(compiled.function), int(compiled.metadata.shared)
        self._threads = 32 * int(compiled.metadata.num_warps)
        self._size, self._pack = len(formats) + SCRATCH, struct.Struct("<" + "".join(formats)).pack_into
        self._free: list[tuple[Any, Any]] = []  # arguments of launches that are over; the driver has copied them

    def __call__(self, grid: tuple[int, int, int], device: int, values: Sequence[float]) -> bool:
        """Start it on the current stream of the device; False where the driver would not."""
        try:
            slots, places = self._free.pop()  # of this launch alone: threads may take turns at any moment
        except IndexError:
            slots = (ctypes.c_uint64 * self._size)()
            first = ctypes.addressof(slots)
            places = (ctypes.c_void_p * self._size)(*(first + SLOT * at for at in range(self._size)))
        self._pack(slots, 0, *values)
        stream = torch._C._cuda_getCurrentRawStream(device)
        code = self._start(self._function, *grid, self._threads, 1, 1, self._shared, stream, places, None)
        self._free.append((slots, places))
        return code == 0


@functools.cache
def driver() -> Start | None:
    """cuLaunchKernel, where there is one."""
    try:
        start = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    except (OSError, AttributeError):
        return None
    start.argtypes = [ctypes.c_void_p, *(ctypes.c_uint,) * 7, *(ctypes.c_void_p,) * 3]
    started: Start = start
    return started


def direct_start(compiled: Any, pointers: int, numbers: Sequence[float]) -> Direct | None:
    """For launches with so many pointers and with numbers of these types; None for what only Triton can start."""
    start, formats = driver(), formats_of(compiled, pointers, numbers)
    return None if start is None or formats is None else Direct(compiled, formats, start)


def formats_of(compiled: Any, pointers: int, numbers: Sequence[float]) -> list[str] | None:
    """How `struct` packs the arguments of a kernel; None if it needs more than its arguments, or others."""
    try:
        told, kinds = compiled.metadata, [k for k in compiled.src.signature.values() if k != "constexpr"]
        plain = told.num_ctas == 1 and not told.launch_cooperative_grid and not told.launch_pdl
        plain = plain and told.global_scratch_size == 0 and told.profile_scratch_size == 0
        plain = plain and told.target.backend == "cuda" and bool(compiled.function)
    except AttributeError:
        return None
    of_pointers, of_numbers = kinds[:pointers], kinds[pointers:]
    expected = [FORMATS["fp32"] if isinstance(number, float) else FORMATS["i32"] for number in numbers]
    formats = [FORMATS.get(kind) if isinstance(kind, str) else None for kind in of_numbers]
    if not plain or formats != expected or any(not str(kind).startswith("*") for kind in of_pointers):
        return None
    return ["Q"] * pointers + expected
