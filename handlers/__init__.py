"""Handlers: ready-made parts that are attached to an engine and listen to its events."""

from .checkpoint import Checkpoint
from .early_stopping import EarlyStopping
from .ema import EMA
from .gradient_clip import GradientClip
from .history import History, HistoryRow
from .lr_finder import LRFinder, LRFinderResult
from .lr_schedule import LRSchedule
from .preemption import Preemption
from .progress_bar import ProgressBar
from .terminate_on_nan import TerminateOnNan
from .validate import Validate

__all__ = [
    "EMA",
    "Checkpoint",
    "EarlyStopping",
    "GradientClip",
    "History",
    "HistoryRow",
    "LRFinder",
    "LRFinderResult",
    "LRSchedule",
    "Preemption",
    "ProgressBar",
    "TerminateOnNan",
    "Validate",
]
