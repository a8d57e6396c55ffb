"""Write recorded metrics and outputs to MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from ..engine import Engine
from ._logger import Counts
from ._optional import import_optional
from ._output import Output
from ._tracking import TrackingLogger, as_found_random_state

__all__ = ["MLflowLogger"]

_MOST_AT_ONCE = 500  # of 1000 metrics that MLflow takes in one request
_LONGEST_WAIT_SEC = 10.0
_STATUS = {"completed": "FINISHED", "terminated": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_NOT_ALLOWED = re.compile(r"[^\w\-. /]")


class MLflowLogger(TrackingLogger):
    """Write every recorded metric, and values of the training step's output, into a run of MLflow.

    Numbers are sent together: at an epoch's end, at the run's, and at the first one after 10 s. When ``run`` returns,
    the MLflow run is FINISHED, KILLED after Ctrl-C or ``interrupt``, FAILED after an error; a next ``run`` goes on with
    it, as does one resumed from a checkpoint. MLflow deletes nothing: what a killed process wrote after its last
    checkpoint is there twice then. Only rank 0 writes.

    Args:
        tracking_uri: such as ``"sqlite:///mlflow.db"`` or a server's address; None: as MLflow is set up.
        experiment: the name of the experiment, which is made where there is none.
        run_name: what the run is called; None: MLflow makes a name up.
        run_id: go on with this run.
        hparams: names and values written as the run's parameters.
        tags: of the run.
        output: as for :class:`CSVLogger`.
        every: as for :class:`CSVLogger`.
        prefix: as for :class:`CSVLogger`.

    Raises:
        ImportError: mlflow is not installed.

    Example:
        >>> log = MLflowLogger("sqlite:///mlflow.db", experiment="digits", output="loss")
        >>> log.attach(trainer)
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        *,
        experiment: str = "Default",
        run_name: str | None = None,
        run_id: str | None = None,
        hparams: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        output: Output = None,
        every: int = 100,
        prefix: str | None = None,
    ) -> None:
        super().__init__(run_id, hparams, output=output, every=every, prefix=prefix)
        if tracking_uri is not None and not isinstance(tracking_uri, str):
            raise TypeError(f"tracking_uri={tracking_uri!r}: a text was wanted, such as 'sqlite:///mlflow.db', or None")
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._run_name = run_name
        self._tags = dict(tags or {})
        self._tracking = import_optional("mlflow.tracking", user="MLflowLogger", extra="mlflow")
        self._entities = import_optional("mlflow.entities", user="MLflowLogger", extra="mlflow")
        self._client: Any = None
        self._waiting: list[Any] = []
        self._send_at_sec = 0.0

    @property
    def client(self) -> Any:
        """The ``mlflow.MlflowClient``, for artifacts and the like; None before something was written."""
        return self._client

    @as_found_random_state()  # MLflow draws for the name of a run
    def _open(self, engine: Engine, is_training: bool) -> None:
        if self._client is None:
            self._client = self._tracking.MlflowClient(tracking_uri=self._tracking_uri)
        if self._run_id is not None:
            self._client.update_run(self._run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(self._experiment)
        run = self._client.create_run(experiment_id, run_name=self._run_name, tags=self._tags)
        self._run_id = run.info.run_id
        params = [self._entities.Param(name, str(value)) for name, value in self._hparams.items()]
        if params:
            self._client.log_batch(self._run_id, params=params)

    def _write(self, counts: Counts, numbers: Mapping[str, int | float]) -> None:
        now_sec = time.time()
        if not self._waiting:
            self._send_at_sec = now_sec + _LONGEST_WAIT_SEC
        self._waiting += [
            self._entities.Metric(_NOT_ALLOWED.sub("_", name), value, int(now_sec * 1000), counts.iteration)
            for name, value in numbers.items()
        ]
        if len(self._waiting) >= _MOST_AT_ONCE or now_sec >= self._send_at_sec:
            self._flush()

    @as_found_random_state()  # and between two attempts to connect
    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for begin in range(0, len(waiting), _MOST_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=waiting[begin : begin + _MOST_AT_ONCE])

    def _close(self, ending: str) -> None:
        try:
            self._flush()
        finally:
            self._client.set_terminated(self._run_id, status=_STATUS[ending])

    def __repr__(self) -> str:
        """Show where it writes, and what."""
        return f"MLflowLogger({self._tracking_uri!r}, experiment={self._experiment!r}, {self._shown()})"
