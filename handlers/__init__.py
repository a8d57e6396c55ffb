"""Handlers: ready-made parts that are attached to an engine and listen to its events."""

from .early_stopping import EarlyStopping
from .history import History, HistoryRow
from .progress_bar import ProgressBar
from .validate import Validate

__all__ = ["EarlyStopping", "History", "HistoryRow", "ProgressBar", "Validate"]
