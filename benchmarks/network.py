"""What collectives cost: the α-β model of messages, on nodes of eight GPUs.

A hop takes α seconds whatever it carries, and a byte 1/bandwidth more. A ring passes pieces around, which costs little
bandwidth and many hops; a tree needs few hops and sends everything twice. The better of the two is taken, inside a node
and between nodes, where every GPU has a network card for its share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NODE = 8  # GPUs


@dataclass(frozen=True)
class Link:
    """alpha: seconds of a hop; bandwidth: bytes per second of one GPU in each direction."""

    alpha: float
    bandwidth: float


@dataclass(frozen=True)
class Network:
    """Assumed, not measured: NVLink inside a node, 400 Gbit/s InfiniBand for every GPU between nodes."""

    inside: Link = Link(2e-6, 350e9)
    between: Link = Link(8e-6, 45e9)
    launch: float = 10e-6  # seconds from the end of what came before to the first byte

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds until every rank has the sum of `size` bytes of all of them."""
        if ranks == 1:
            return 0.0
        inside, nodes = _split(ranks)
        seconds = min(ring(size, inside, self.inside), tree(size, inside, self.inside))
        share = size / inside
        return self.launch + seconds + min(ring(share, nodes, self.between), tree(share, nodes, self.between))

    def all_gather(self, size: float, ranks: int) -> float:
        """Seconds until every rank has the `size` bytes of each of them."""
        if ranks == 1:
            return 0.0
        inside, nodes = _split(ranks)
        seconds = _hops(inside) * self.inside.alpha + (ranks - nodes) * size / self.inside.bandwidth
        return self.launch + seconds + _hops(nodes) * self.between.alpha + (nodes - 1) * size / self.between.bandwidth


def ring(size: float, ranks: int, link: Link) -> float:
    """All-reduce: every rank passes on pieces of 1/ranks, once around to add them and once to spread the sums."""
    return 2 * (ranks - 1) * (link.alpha + size / ranks / link.bandwidth)


def tree(size: float, ranks: int, link: Link) -> float:
    """All-reduce: up to the root and down again, in pieces that follow each other."""
    return 2 * _hops(ranks) * link.alpha + (2 * size / link.bandwidth if ranks > 1 else 0.0)


def _hops(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


def _split(ranks: int) -> tuple[int, int]:
    """GPUs of a node, and nodes."""
    inside = min(ranks, NODE)
    if ranks % inside:
        raise ValueError(f"ranks: expected up to {NODE}, or a multiple of it; got {ranks}")
    return inside, ranks // inside
