"""Kernels that Triton has compiled, started by the CUDA driver itself: a launch costs the host a fifth of Triton's own.

All but the pointers is laid out in memory once, as the driver reads it. Nothing here knows of Triton but what
`direct_start` asks of a compiled kernel; where the answer is not the expected one it returns None, and Triton starts
that kernel as ever.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SLOT = 8  # bytes of an argument; all of them are of 8 bytes or less, and little-endian
FORMATS = {"i32": "i4x", "fp32": "f4x"}
SCRATCH = 2  # pointers that Triton adds after the arguments of a kernel, null where it asks for no scratch memory
CONFIG = struct.Struct("<7I4xQQI4x")  # CUlaunchConfig: grid, threads and shared memory; stream; no attributes
AT_STREAM, REST = 32, 16  # of it: where the stream stands, and bytes after that
ALIGNED = 16  # bytes; where a pointer is not, there are no wide loads
data_ptr = Tensor.data_ptr
Start = Callable[..., int]


class _Memory(NamedTuple):
    """What one launch is told; of this launch alone while it is being started."""

    told: Any  # its configuration, then its arguments
    address: int  # of these, and so of the configuration
    places: int  # address of pointers to the arguments
    kept: Any


class Direct:
    """A launch of a compiled kernel on one device, with its grid and its numbers.

    `compiled` is kept: its code goes when it goes.
    """

    def __init__(
        self, compiled: Any, pointers: int, formats: Sequence[str], grid: tuple[int, int, int], numbers: Sequence[float]
    ) -> None:
        self._compiled, self._function, self._start = compiled, int(compiled.function), driver()
        self._pack = struct.Struct(f"<Q{REST}x{pointers}Q").pack_into  # stream and pointers, and what is zero between
        shape = (*grid, 32 * int(compiled.metadata.num_warps), 1, 1, int(compiled.metadata.shared))
        arguments = struct.pack("<" + "".join(formats), *numbers)
        self._told = CONFIG.pack(*shape, 0, 0, 0) + bytes(SLOT * pointers) + arguments + bytes(SLOT * SCRATCH)
        self._free: list[_Memory] = []  # of launches that are over; the driver has copied it

    def __call__(self, pointers: Iterable[Tensor], device: int) -> bool:
        """Start it on the current stream of the device; False where it was not."""
        addresses = [*map(data_ptr, pointers)]
        if functools.reduce(operator.or_, addresses) % ALIGNED:
            return False
        try:
            memory = self._free.pop()  # threads may take turns at any moment
        except IndexError:
            memory = self._memory()
        told, address, places, _ = memory
        self._pack(told, AT_STREAM, torch._C._cuda_getCurrentRawStream(device), *addresses)
        code = self._start(address, self._function, places, None)  # type: ignore[misc]
        self._free.append(memory)
        return code == 0

    def _memory(self) -> _Memory:
        told = ctypes.create_string_buffer(self._told, len(self._told))
        first, last = ctypes.addressof(told) + CONFIG.size, ctypes.addressof(told) + len(told)
        places = (ctypes.c_void_p * ((last - first) // SLOT))(*range(first, last, SLOT))
        return _Memory(told, ctypes.addressof(told), ctypes.addressof(places), places)


@functools.cache
def driver() -> Start | None:
    """cuLaunchKernelEx, where there is one."""
    try:
        start = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    start.argtypes = [ctypes.c_void_p] * 4
    started: Start = start
    return started


def direct_start(compiled: Any, pointers: int, grid: tuple[int, int, int], numbers: Sequence[float]) -> Direct | None:
    """For launches with so many pointers and with these numbers; None for what only Triton can start."""
    formats = formats_of(compiled, pointers, numbers)
    return None if driver() is None or formats is None else Direct(compiled, pointers, formats, grid, numbers)


def formats_of(compiled: Any, pointers: int, numbers: Sequence[float]) -> list[str] | None:
    """How `struct` packs the numbers of a kernel; None if it needs more than its arguments, or others."""
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
    return expected
