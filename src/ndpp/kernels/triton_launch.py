"""How kernels are started, and how they are built for a device that is not here.

A kernel takes pointers, then numbers, then constants (`tl.constexpr`). Grid and numbers are those of a layer and a
shape: they are told once. What a kernel is compiled for is found out once as well, and from then on the driver is
called directly (`triton_direct`): Triton's own launch asks everything again every time.
"""

# mypy: ignore-errors
from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .triton_direct import ALIGNED, Direct, direct_start

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Launch(NamedTuple):
    """One start of a kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    warps: int
    stages: int


recorded: list[Launch] | None = None  # a list here takes launches in place of the device
works: set[int] = set()  # devices for which a kernel was built


class Launcher:
    """A kernel with its constants, for pointers of certain dtypes (None: not there). Numbers must fit in 32 bits."""

    def __init__(self, kernel: Any, warps: int, stages: int, constants: tuple[Any, ...]) -> None:
        self.kernel, self.warps, self.stages, self.constants = kernel, warps, stages, constants
        self.compiled: dict[int, Any] = {}  # by device; for pointers that are aligned

    def prepared(self, grid: tuple[int, int, int], *numbers: float) -> Prepared:
        """Of which all is known but the pointers. Numbers are what they are on a device: of 32 bits."""
        rounded = [ctypes.c_float(number).value if isinstance(number, float) else number for number in numbers]
        return Prepared(self, grid, tuple(rounded))

    def start(self, grid: tuple[int, int, int], pointers: tuple[Tensor | None, ...], numbers: tuple[float, ...]) -> Any:
        """By Triton, which compiles it if need be; what it has compiled."""
        options = {} if INTERPRETED else {"num_warps": self.warps, "num_stages": self.stages}
        return self.kernel[grid](*pointers, *numbers, *self.constants, **options)


class Prepared:
    """A launch with its grid and its numbers."""

    def __init__(self, launcher: Launcher, grid: tuple[int, int, int], numbers: tuple[float, ...]) -> None:
        self.launcher, self.grid, self.numbers = launcher, grid, numbers
        self._direct: dict[int, Direct | None] = {}  # by device
        self._whole = False  # none of its pointers is None

    def __call__(self, *pointers: Tensor | None) -> None:
        """Start it on the current device, without waiting for it."""
        if recorded is None and not INTERPRETED:
            device = torch._C._cuda_getDevice()
            direct = self._direct.get(device)
            if direct is not None and direct(pointers if self._whole else _present(pointers), device):
                return
        self._start(pointers)

    def _start(self, pointers: tuple[Tensor | None, ...]) -> None:
        """By Triton itself; or not at all, where launches are recorded."""
        by = self.launcher
        if recorded is not None:
            arguments = (*pointers, *self.numbers, *by.constants)
            recorded.append(Launch(by.kernel, self.grid, arguments, by.warps, by.stages))
            return
        if INTERPRETED:
            by.start(self.grid, pointers, self.numbers)
            return
        device, present = torch._C._cuda_getDevice(), _present(pointers)
        aligned = all([t.data_ptr() % ALIGNED == 0 for t in present])
        if aligned and device in by.compiled and device not in self._direct:
            direct = direct_start(by.compiled[device], len(present), self.grid, self.numbers)
            self._direct[device], self._whole = direct, len(present) == len(pointers)
            if direct is not None and direct(present, device):
                return
        compiled = by.start(self.grid, pointers, self.numbers)
        works.add(device)
        if aligned:
            by.compiled.setdefault(device, compiled)


def _present(pointers: tuple[Tensor | None, ...]) -> Sequence[Tensor]:
    return [t for t in pointers if t is not None]


@functools.cache
def launcher(kernel: Any, warps: int, stages: int, dtypes: tuple[torch.dtype | None, ...], *constants: Any) -> Launcher:
    """One for each kind of arguments: what a kernel was compiled for does for all of that kind."""
    return Launcher(kernel, warps, stages, constants)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; Triton's own is made for kernels, and slow on the host."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least that is not below n."""
    return 1 << (n - 1).bit_length()


# --- without a device ---


class Built(NamedTuple):
    """What a kernel takes of a multiprocessor."""

    shared: int  # bytes
    registers: int  # of a thread
    stack: int  # bytes of a thread; where registers are spilled to


def build(started: Launch, capability: int = 90) -> Built:
    """Compile for a CUDA device of this capability, and say what that takes."""
    made = compiled_for(started, capability)
    return Built(made.metadata.shared, *_usage(made.asm["cubin"]))


def compiled_for(started: Launch, capability: int = 90) -> Any:
    """A kernel for a device of this capability, which need not be present, as the launch would be specialised."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for place, (parameter, value) in enumerate(zip(started.kernel.params, started.arguments, strict=True)):
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
            continue
        signature[parameter.name] = _type(value)
        if isinstance(value, Tensor):
            attributes[(place,)] = [["tt.divisibility", ALIGNED]]
    source = ASTSource(started.kernel, signature, constants, attributes)
    options = {"num_warps": started.warps, "num_stages": started.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _usage(binary: bytes) -> tuple[int, int]:
    """Registers, and bytes of the stack (where spills go), of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    usage = dict(re.findall(r"(REG|STACK):(\d+)", done.stdout))
    return int(usage["REG"]), int(usage["STACK"])


_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
}


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"
