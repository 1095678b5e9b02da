"""How kernels are started, and how they are built for a device that is not here."""

# mypy: ignore-errors
from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

# How float32 products are made: "tf32x3" by three tensor-core products of split factors, within a few roundings of
# float32; "ieee" by ordinary arithmetic (builds spill badly); "tf32" by one product that keeps ten bits of each factor.
PRECISION = "tf32x3"
# Centred rows of 16-bit inputs are rounded to bfloat16 for the tensor cores; the interpreter has no bfloat16 product.
NARROW = os.environ.get("TRITON_INTERPRET") != "1"


def precision(dtype: torch.dtype) -> dict[str, Any]:
    """How products with rows of this dtype are made."""
    return {"NARROW": NARROW and dtype != torch.float32, "PRECISION": PRECISION}


class Launch(NamedTuple):
    """One start of a kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int


recorded: list[Launch] | None = None  # a list here takes launches in place of the device


def launch(kernel: Any, grid: tuple[int, ...], warps: int, on: Tensor, /, **arguments: Any) -> None:
    """Start a kernel on the device of a tensor, without waiting for it."""
    if recorded is not None:
        recorded.append(Launch(kernel, grid, arguments, warps))
    elif on.device.type == "cuda" and on.device.index != torch.cuda.current_device():
        with torch.cuda.device(on.device):
            kernel[grid](**arguments, num_warps=warps)
    else:
        kernel[grid](**arguments, num_warps=warps)


class Built(NamedTuple):
    """What a kernel takes of a multiprocessor."""

    shared: int  # bytes
    registers: int  # of a thread
    stack: int  # bytes of a thread; where registers are spilled to


def build(started: Launch, capability: int = 90) -> Built:
    """Compile for a CUDA device of this capability, which need not be present, as the launch would be specialised."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(started.kernel.params):
        value = started.arguments[parameter.name]
        whole = isinstance(value, int) and not isinstance(value, bool)
        if parameter.is_constexpr or value is None or (whole and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
            continue
        signature[parameter.name] = _type(value)
        if isinstance(value, Tensor) or (whole and value % 16 == 0 and not parameter.do_not_specialize):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(started.kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": started.warps})
    return Built(made.metadata.shared, *_usage(made.asm["cubin"]))


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
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
