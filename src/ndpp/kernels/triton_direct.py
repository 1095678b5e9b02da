"""Kernels that Triton has compiled, started by the CUDA driver itself: a launch costs the host a fifth of Triton's own.

All but the pointers is laid out in memory once, as the driver reads it. Nothing here knows of Triton but what
`direct_start` asks of a compiled kernel; where the answer is not the expected one it returns None, and Triton starts
that kernel as ever.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

SLOT = 8  # bytes of an argument; all of them are of 8 bytes or less, and little-endian
FORMATS = {"i32": "i4x", "fp32": "f4x"}
SCRATCH = 2  # pointers that Triton adds after the arguments of a kernel, null where it asks for no scratch memory
CONFIG, STREAM = struct.Struct("<7I4xQQI4x"), struct.Struct("<Q")  # CUlaunchConfig: sizes, stream, no attributes
AT_STREAM = 32
pack_stream_into = STREAM.pack_into
Start = Callable[..., int]


class _Memory(NamedTuple):
    """What one launch is told; of this launch alone while it is being started."""

    slots: Any  # arguments
    config: Any
    address_of_config: int
    address_of_places: int  # of pointers to the arguments
    kept: Any


class Direct:
    """A launch of a compiled kernel on one device, with its grid and its numbers.

    `compiled` is kept: its code goes when it goes.
    """

    def __init__(
        self, compiled: Any, pointers: int, formats: Sequence[str], grid: tuple[int, int, int], numbers: Sequence[float]
    ) -> None:
        self._compiled, self._function, self._start = compiled, int(compiled.function), driver()
        self._pack = struct.Struct(f"<{pointers}Q").pack_into
        shape = (*grid, 32 * int(compiled.metadata.num_warps), 1, 1, int(compiled.metadata.shared))
        self._config = CONFIG.pack(*shape, 0, 0, 0)
        arguments = struct.pack("<" + "".join(formats), *numbers)
        self._slots = bytes(SLOT * pointers) + arguments + bytes(SLOT * SCRATCH)
        self._free: list[_Memory] = []  # of launches that are over; the driver has copied it

    def __call__(self, addresses: Sequence[int], device: int) -> bool:
        """Start it on the current stream of the device; False where the driver would not."""
        try:
            memory = self._free.pop()  # threads may take turns at any moment
        except IndexError:
            memory = self._memory()
        slots, config, address_of_config, address_of_places, _ = memory
        self._pack(slots, 0, *addresses)
        pack_stream_into(config, AT_STREAM, torch._C._cuda_getCurrentRawStream(device))
        code = self._start(address_of_config, self._function, address_of_places, None)  # type: ignore[misc]
        self._free.append(memory)
        return code == 0

    def _memory(self) -> _Memory:
        slots = ctypes.create_string_buffer(self._slots, len(self._slots))
        config = ctypes.create_string_buffer(self._config, len(self._config))
        first = ctypes.addressof(slots)
        places = (ctypes.c_void_p * (len(slots) // SLOT))(*range(first, first + len(slots), SLOT))
        return _Memory(slots, config, ctypes.addressof(config), ctypes.addressof(places), places)


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
