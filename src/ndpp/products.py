"""The stock operation and what goes around it: a scale and a bias, each in one pass, and the gradients of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad
import torch.nn.functional as F
from torch import Tensor

from . import kernels
from .keeping import readable, works_apart

Operation = Callable[..., Tensor]


class Link:
    """What the two ends of a scaled call know of each other: where the gradient of the gain comes from."""

    explicit = False  # ⟨dy, f(x)⟩ at the output, from f(x) computed again, rather than ⟨dx, x⟩ at the node


COMPILED = Link()  # of calls that are compiled, of which no gradient is differentiated


def scaled_output(
    operation: Operation, x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, link: Link | None
) -> Tensor:
    """operation(x, weight)·gain + b; in place, but where a graph is made without a node at its other end."""
    y = operation(x, weight, None)
    if link is COMPILED and torch.is_grad_enabled():
        fused: Tensor = Fused.apply(y, gain, bias)
        return fused
    if _is_transformed():
        return (y * gain + bias).to(y.dtype)
    if not torch.is_grad_enabled():
        return kernels.scaled_output_(y, gain, bias)
    if link is None:
        return (y * gain + bias).to(y.dtype)
    scaled: Tensor = Scaling.apply(y, gain, bias, x, weight, operation, link)
    return scaled


def _is_transformed() -> bool:
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return forward_mode or torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def shifted_output(operation: Operation, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """operation(x, weight) + b with channels in axis 1; bias and its gradient by the faster of two ways."""
    if _is_transformed() or not torch.is_grad_enabled():
        return operation(x, weight, bias)
    if works_apart(x) and operation is not pointwise:
        shifted: Tensor = Shift.apply(operation(x, weight, None), bias, True)
        return shifted
    if bias.requires_grad and x.dtype == torch.float32 and x.stride(1) == 1 and readable(x):
        shifted = Shift.apply(operation(x, weight, bias.detach()), bias, False)
        return shifted
    return operation(x, weight, bias)


class Shift(torch.autograd.Function):
    """y + b in place, or y which holds b already; what reaches b is a sum.

    On a GPU a convolution's own bias takes four times as long as the convolution, on a CPU its gradient six times as
    long as a sum.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, missing: bool) -> Tensor:
        ctx.told = (bias.shape[0], *(1 for _ in y.shape[2:])), bias.dtype
        ctx.mark_dirty(y)
        return kernels.scaled_output_(y, None, bias.reshape(ctx.told[0])) if missing else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        shape, dtype = ctx.told
        _, of_bias = kernels.scaled_gradient(grad, None, shape, dtype)
        return grad, of_bias.flatten(), None


class Scaling(torch.autograd.Function):
    """y·gain + b in place, for y = f(x) with f linear. Nothing of the output is kept for the backward pass.

    What reaches the gain is ⟨dy, f(x)⟩ = ⟨dx, x⟩ with dx = fᵀ(dy), which f hands to the node: it is found there. Not
    once a backward pass was itself recorded, as dx then holds more than that: f(x) is computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        gain: Tensor,
        bias: Tensor,
        x: Tensor,
        weight: Tensor,
        operation: Operation,
        link: Link,
    ) -> Tensor:
        ctx.save_for_backward(gain, x, weight)
        ctx.told = bias.shape, bias.dtype, operation, link
        ctx.mark_dirty(y)
        return kernels.scaled_output_(y, gain, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gain, x, weight = ctx.saved_tensors
        shape, dtype, operation, link = ctx.told
        link.explicit = link.explicit or torch.is_grad_enabled()
        of_gain = None
        if link.explicit:
            of_gain = (grad * operation(x, weight, None)).to(gain.dtype).sum_to_size(gain.shape)
        scaled, of_bias = kernels.scaled_gradient(grad, gain, shape, dtype)
        return scaled, of_gain, of_bias, None, None, None, None


class Fused(torch.autograd.Function):
    """As `Scaling`, in operations that a compiler puts together."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(gain)
        ctx.told = bias.shape, bias.dtype
        shifted = y * gain + bias
        # What is of that dtype already must not be cast: torch 2.11 then compiles a backward pass without gradients.
        return shifted if shifted.dtype == y.dtype else shifted.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gain,), (shape, dtype) = ctx.saved_tensors, ctx.told
        of_sum = grad.to(gain.dtype)
        return (of_sum * gain).to(grad.dtype), None, of_sum.sum_to_size(shape).to(dtype)


def pointwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution by one pixel as a product of matrices, whose bias is nearly free: where `suits_pointwise`."""
    if weight.element_size() != 2 or _is_transformed():
        return F.conv2d(x, weight, bias)
    y: Tensor = Pointwise.apply(x.to(weight.dtype), weight, bias)
    return y


def suits_pointwise(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether a product is best for such a convolution: of 16 bits, with channels last, on a GPU."""
    return works_apart(x) and dtype.itemsize == 2 and x.is_contiguous(memory_format=torch.channels_last)


class Pointwise(torch.autograd.Function):
    """On (batch, channels, height, width) with channels last; one node in place of those of its views."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        size = (x.shape[0], weight.shape[0], *x.shape[2:])
        y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        pixels, matrix, out = _pixels(x), weight.flatten(1).t(), _pixels(y)  # y is no view: it may be written to
        if bias is None:
            torch.mm(pixels, matrix, out=out)
        else:
            torch.addmm(bias, pixels, matrix, out=out)
        ctx.save_for_backward(x, weight)
        ctx.bias = None if bias is None else ((*bias.shape, 1, 1), bias.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_y, of_x, of_weight, of_bias = _pixels(grad), None, None, None
        if ctx.needs_input_grad[0]:
            of_x = (of_y @ weight.flatten(1)).view(x.shape[0], *x.shape[2:], -1).permute(0, 3, 1, 2)
        if ctx.needs_input_grad[1]:
            of_weight = (of_y.t() @ _pixels(x)).view(weight.shape)
        if ctx.bias is not None and ctx.needs_input_grad[2]:
            of_bias = kernels.scaled_gradient(grad, None, *ctx.bias)[1].flatten()
        return of_x, of_weight, of_bias


def _pixels(x: Tensor) -> Tensor:
    """(pixels, channels)."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The output has its features last, as torch.nn's: no view of it, which an operation in place could not change."""
    return F.linear(x.movedim(1, -1), weight, bias)
