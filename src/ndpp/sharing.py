"""Layers that read the same tensor: whichever is called first finds S, μ and D, and the others take them from it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .products import Link
from .whitening import Moments


class Found(NamedTuple):
    """What is the same for all layers that read a tensor by the same rows and settings."""

    x: Tensor  # that tensor as stock operations read it; what comes back to it reaches the statistics
    gain: Tensor | None
    batch: Moments
    used: tuple[Tensor, Tensor, Tensor]  # D, μ and their unit, of that batch where it had rows
    link: Link | None

    def for_others(self) -> Found:
        """Nothing of it leads back to the weight of who found it, but by way of the tensor."""
        if self.x.requires_grad:
            return self
        d, mean, unit = (t.detach() for t in self.used)
        return self._replace(gain=None if self.gain is None else self.gain.detach(), used=(d, mean, unit))


class Visit(NamedTuple):
    """A call: the tensor that was given, as it was then, and all that decides what is found in it."""

    source: Tensor
    version: int
    told: tuple[Any, ...]

    def equals(self, other: Visit) -> bool:
        return self.source is other.source and self.version == other.version and self.told == other.told


class Meeting:
    """Where such layers leave what was found.

    It stays until all have been there, until somebody comes with another tensor, or until the backward pass: what was
    found belongs to one graph, and goes with it.
    """

    def __init__(self, members: int) -> None:
        self.members = members
        self.clear()

    def clear(self) -> None:
        self._left: tuple[Visit, Found] | None = None
        self._came: set[int] = set()

    def leave(self, layer: object, visit: Visit, found: Found) -> None:
        """By the first to come."""
        self._left, self._came = (visit, found.for_others()), {id(layer)}

    def fetch(self, layer: object, visit: Visit) -> Found | None:
        """What another layer found in this very tensor; None for whoever has to look."""
        left = self._left  # once: other threads may come in between
        if left is None or id(layer) in self._came or not left[0].equals(visit):
            self.clear()
            return None
        found = left[1]
        self._came.add(id(layer))
        if len(self._came) == self.members:
            self.clear()
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"members": self.members}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["members"])  # type: ignore[misc]
