"""Who uses what a layer or a norm computes: observed in one run, down to single operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..feeding import feed, tensors

CODE = "other code"
OUTPUT = "the output of the model"
_READS = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__"}


class Flow(TorchFunctionMode):
    """While active, records the producer and the users of every tensor that the watched modules compute."""

    def __init__(self, watched: Iterable[nn.Module]) -> None:
        super().__init__()
        self.watched = set(watched)
        self.inputs: dict[nn.Module, list[Tensor]] = {}
        self.outputs: dict[nn.Module, list[Tensor]] = {}  # kept alive, so that ids stay unique
        self.users: dict[int, set[nn.Module | str]] = {}
        self._running: list[nn.Module] = []

    def producers(self, module: nn.Module) -> set[nn.Module | None]:
        """Of its inputs; None stands for code that is no watched module."""
        made = {id(t): producer for producer, outputs in self.outputs.items() for t in outputs}
        return {made.get(id(t)) for t in self.inputs.get(module, [])}

    def users_of(self, module: nn.Module) -> set[nn.Module | str]:
        return set().union(*(self.users.get(id(t), set()) for t in self.outputs.get(module, [])))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = tensors([args, kwargs or {}])
        made = tensors(result)
        reads = bool(made) or getattr(func, "__name__", "") in _READS  # shapes and dtypes are nobody's business
        if reads and not (len(made) == 1 and any(made[0] is t for t in given) and not _in_place(func)):
            self._use(given, self._running[-1] if self._running else CODE)
        return result

    def _use(self, given: list[Tensor], user: nn.Module | str) -> None:
        for tensor in given:
            if id(tensor) in self.users:
                self.users[id(tensor)].add(user)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._running:  # within another watched module, it is that one's business
            self.inputs.setdefault(module, []).extend(tensors([args, kwargs]))
        self._running.append(module)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        if not self._running:
            for tensor in tensors(output):
                self.users.setdefault(id(tensor), set())
                self.outputs.setdefault(module, []).append(tensor)


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def trace(
    model: nn.Module, batch: Any, watched: Iterable[nn.Module], look: Callable[[nn.Module, Tensor, Tensor], None]
) -> tuple[Flow, Any]:
    """One run of the model. look(module, input, output) is called for every watched module with one input tensor."""
    flow = Flow(watched)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        flow.after(module, args, output)
        given = tensors([args, kwargs])
        if len(given) == 1 and isinstance(output, Tensor):
            with torch._C.DisableTorchFunction():
                look(module, given[0], output)

    handles = [m.register_forward_pre_hook(flow.before, with_kwargs=True) for m in flow.watched]
    handles += [m.register_forward_hook(after, with_kwargs=True) for m in flow.watched]
    try:
        with flow:
            output = feed(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    flow._use(tensors(output), OUTPUT)
    return flow, output
