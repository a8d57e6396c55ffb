"""The device-strategy layer: where a model runs, in what precision, on how many devices and in how many processes.

The one part of pellucid that knows of devices, autocast and parallel wrappers. It knows nothing of the engine.
"""

from .alone import alone
from .base import Strategy
from .data_parallel import DataParallel
from .ddp import DDP
from .dealing import stated_length
from .fsdp import FSDP
from .launch import launch
from .peers import Peers
from .samplers import tell_epoch
from .seeding import seed_everything
from .selection import resolve
from .sharding import AlreadySharded, Shards, already_sharded
from .single import SingleDevice

__all__ = [
    "DDP",
    "FSDP",
    "AlreadySharded",
    "DataParallel",
    "Peers",
    "Shards",
    "SingleDevice",
    "Strategy",
    "alone",
    "already_sharded",
    "launch",
    "resolve",
    "seed_everything",
    "stated_length",
    "tell_epoch",
]
