"""pellucid's engine: an event-driven training loop with explicit state passing, on PyTorch-Ignite's ``Engine``."""

from .durable import (
    CheckpointInfo,
    Saving,
    clear_unfinished,
    list_checkpoints,
    load_weights,
    remove_checkpoint,
    resume,
    save_checkpoint,
)
from .engine import Engine, Handler, Step
from .errors import (
    CheckpointError,
    DataError,
    EventError,
    HandlerError,
    LimitError,
    MetricError,
    ModelError,
    MonitorError,
    PellucidError,
    RecordError,
    RunError,
    StateError,
    StrategyError,
    UpdateError,
)
from .events import EventEnum, EventLike, Events
from .records import MetricsView, Record
from .state import StateSnapshot, StateView
from .strategies import DDP, FSDP, DataParallel, SingleDevice, Strategy, already_sharded, launch, seed_everything
from .supervised import (
    create_supervised_evaluator,
    create_supervised_trainer,
    supervised_evaluation_step,
    supervised_training_step,
)
from .table import CallWatcher, Handle

__all__ = [
    "DDP",
    "FSDP",
    "CallWatcher",
    "CheckpointError",
    "CheckpointInfo",
    "DataError",
    "DataParallel",
    "Engine",
    "EventEnum",
    "EventError",
    "EventLike",
    "Events",
    "Handle",
    "Handler",
    "HandlerError",
    "LimitError",
    "MetricError",
    "MetricsView",
    "ModelError",
    "MonitorError",
    "PellucidError",
    "Record",
    "RecordError",
    "RunError",
    "Saving",
    "SingleDevice",
    "StateError",
    "StateSnapshot",
    "StateView",
    "Step",
    "Strategy",
    "StrategyError",
    "UpdateError",
    "already_sharded",
    "clear_unfinished",
    "create_supervised_evaluator",
    "create_supervised_trainer",
    "launch",
    "list_checkpoints",
    "load_weights",
    "remove_checkpoint",
    "resume",
    "save_checkpoint",
    "seed_everything",
    "supervised_evaluation_step",
    "supervised_training_step",
]
