"""Who uses what a layer or a norm computes: observed while the model runs, down to single operations."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..feeding import feed, tensors

OUTPUT = "the output of the model"
STORED = "an object that keeps it"
Look = Callable[[nn.Module, list[Tensor], Any], None]


class Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, records the producers and the users of all that the watched modules compute.

    Every operation passes here, those of scripts and of autograd functions too, and those that write in place.
    """

    supports_higher_order_operators = True

    def __init__(self, watched: Iterable[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watched = set(watched)
        self.users: dict[nn.Module, set[nn.Module | str]] = {}
        self.producers: dict[nn.Module, set[nn.Module | None]] = {}  # of its inputs; None is code that is not watched
        self._running: list[nn.Module] = []
        self._made: dict[int, tuple[Tensor, set[nn.Module]]] = {}  # alive, so that ids stay unique

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "?").partition(".")[0]
        self._use(tensors([args, kwargs or {}]), self._running[0] if self._running else f"the operation {name}")
        return func(*args, **(kwargs or {}))

    def _use(self, given: list[Tensor], user: nn.Module | str) -> None:
        for tensor in given:
            for producer in self._made.get(id(tensor), (tensor, ()))[1]:
                if producer is not user:
                    self.users[producer].add(user)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._running:  # within another watched module, it is that one's business
            given = tensors([args, kwargs])
            if isinstance(module, nn.MultiheadAttention):  # masks are no data
                given = tensors([args[:3], [kwargs.get(name) for name in ("query", "key", "value")]])
            for tensor in given:
                made = self._made.get(id(tensor))
                self.producers.setdefault(module, set()).update(made[1] if made else {None})
        self._running.append(module)

    def after(self, module: nn.Module, output: Any) -> None:
        self._running.pop()
        if not self._running:
            self.users.setdefault(module, set())
            for tensor in tensors(output):
                self._made.setdefault(id(tensor), (tensor, set()))[1].add(module)

    def run(self, model: nn.Module, batch: Any, look: Look) -> Any:
        """The output for a batch. look(module, inputs, output) sees every call of a watched module."""

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.after(module, output)
            self._running.append(module)  # what looking computes is nobody's use
            look(module, tensors([args, kwargs]), output)
            self._running.pop()

        handles = [m.register_forward_pre_hook(self.before, with_kwargs=True) for m in self.watched]
        handles += [m.register_forward_hook(after, with_kwargs=True, always_call=True) for m in self.watched]
        try:
            with self:
                output = feed(model, batch)
            self._use(tensors(output), OUTPUT)
            self._find_stored(output)
        finally:
            for handle in handles:
                handle.remove()
            self._running.clear()
            self._made.clear()
        return output

    def _find_stored(self, output: Any) -> None:
        """What is still referred to after the run, other than by the output and by this record, may be used later."""
        gc.collect()  # cycles hold what nobody will use
        known = Counter(map(id, tensors(output)))
        usual: int | None = None  # of a tensor that only the record holds; interpreters count differently
        for tensor, producers in [(torch.empty(0), set[nn.Module]()), *self._made.values()]:
            count = sys.getrefcount(tensor) - known[id(tensor)]
            usual = count if usual is None else usual
            if count > usual:
                for producer in producers:
                    self.users[producer].add(STORED)
