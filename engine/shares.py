"""Which batches are this rank's, for an engine whose strategy has several."""

from __future__ import annotations

from .agreed_order import AgreedOrder
from .strategies import Shards, Strategy

__all__ = ["make_shards"]


def make_shards(strategy: Strategy) -> Shards | None:
    """Return what shares data out over the ranks of a strategy, None where there is one."""
    peers = strategy.peers
    if peers is None:
        return None
    return Shards(peers, strategy.data_rank, strategy.data_world_size, strategy.uneven, AgreedOrder(peers))
