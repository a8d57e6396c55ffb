"""Handlers: ready-made parts that are attached to an engine and listen to its events."""

from ._attachable import Attachable, StatefulHandler
from .batch_size_finder import BatchSizeFinder, BatchSizeResult
from .checkpoint import Checkpoint
from .csv_logger import CSVLogger
from .early_stopping import EarlyStopping
from .ema import EMA
from .gradient_clip import GradientClip
from .history import History, HistoryRow
from .json_lines_logger import JSONLinesLogger
from .live_plot import LivePlot
from .lr_finder import LRFinder, LRFinderResult
from .lr_schedule import LRSchedule
from .mlflow_logger import MLflowLogger
from .model_summary import ModelSummary, ModelSummaryRow
from .predictions import Predictions
from .preemption import Preemption
from .profile import Profile
from .progress_bar import ProgressBar
from .sample_predictions import SamplePredictions
from .saved_predictions import SavedPredictions
from .tensorboard_logger import TensorBoardLogger
from .terminate_on_nan import TerminateOnNan
from .throughput import Throughput
from .time_limit import TimeLimit
from .timing import Timing, TimingRow
from .validate import Validate
from .wandb_logger import WandbLogger

__all__ = [
    "EMA",
    "Attachable",
    "BatchSizeFinder",
    "BatchSizeResult",
    "CSVLogger",
    "Checkpoint",
    "EarlyStopping",
    "GradientClip",
    "History",
    "HistoryRow",
    "JSONLinesLogger",
    "LRFinder",
    "LRFinderResult",
    "LRSchedule",
    "LivePlot",
    "MLflowLogger",
    "ModelSummary",
    "ModelSummaryRow",
    "Predictions",
    "Preemption",
    "Profile",
    "ProgressBar",
    "SamplePredictions",
    "SavedPredictions",
    "StatefulHandler",
    "TensorBoardLogger",
    "TerminateOnNan",
    "Throughput",
    "TimeLimit",
    "Timing",
    "TimingRow",
    "Validate",
    "WandbLogger",
]
