"""What may be known and kept while code runs: not everywhere is a tensor a value that is there and stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")
MOST_KEPT = 256  # tables of each kind
MOST_REMEMBERED = 4096


def is_traced() -> bool:
    """While code is traced or transformed: tensors made there must not outlive it, nor be read."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    )


def is_exporting() -> bool:
    """Whether a program is being exported. torch's own function says so, up to 2.11, of all that is compiled."""
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else bool(flag)


def readable(t: Tensor) -> bool:
    """Whether reading the value of a tensor waits for nothing: on the CPU, outside of tracing."""
    return t.device.type == "cpu" and not is_traced()


def works_apart(t: Tensor) -> bool:
    """Whether it lies on a GPU, which works beside the host."""
    return t.is_cuda


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU has products of bfloat16 numbers: without them they are slower than those of float32."""
    asked = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return bool(torch._C._has_mkldnn and any(ask is not None and ask() for ask in asked))


def seen(rows: Tensor) -> bool | None:
    """Whether there were rows, where their number is readable."""
    return bool(rows > 0) if readable(rows) else None


def remembered(find: Callable[..., Made]) -> Callable[..., Made]:
    """A function of numbers, asked once for the same ones; never where they may be symbols."""
    cached = functools.lru_cache(MOST_REMEMBERED)(find)

    @functools.wraps(find)
    def call(*arguments: Any) -> Made:
        return find(*arguments) if is_traced() else cached(*arguments)

    return call


def kept(make: Callable[..., Made]) -> Callable[..., Made]:
    """A function of numbers and, last, a device, whose tensors are made once for the same arguments.

    Not where they are traced, nor while a CUDA graph is captured: what is recorded there holds no values yet.
    """
    cached = functools.lru_cache(MOST_KEPT)(make)

    @functools.wraps(make)
    def call(*arguments: Any) -> Made:
        on_gpu = arguments[-1].type == "cuda"
        if is_traced() or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return make(*arguments)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return cached(*arguments)
        return cached(*arguments)

    return call
