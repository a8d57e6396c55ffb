"""Write recorded metrics and outputs to Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from ..engine import Engine
from ._logger import Counts
from ._optional import import_optional
from ._output import Output
from ._tracking import TrackingLogger

__all__ = ["WandbLogger"]

_REPORTING = "WANDB_ERROR_REPORTING"


class WandbLogger(TrackingLogger):
    """Write every recorded metric, and values of the training step's output, into a run of Weights & Biases.

    The W&B run is finished however ``run`` is left; a next ``run`` goes on with it under the same id, as does one
    resumed from a checkpoint. Only rank 0 writes.

    With ``mode="offline"`` everything stays in a folder (``wandb sync`` sends it later): no connection is made, and the
    process that the client starts ends with the run.

    Args:
        project: where the run belongs.
        name: what the run is called; None: W&B makes a name up.
        directory: where the client keeps its files; None: as W&B is set up.
        mode: ``"online"``, ``"offline"`` or ``"disabled"``; None: as W&B is set up.
        run_id: go on with this run.
        hparams: names and values written as the run's config.
        init: anything else that ``wandb.init`` takes, such as ``{"entity": "team", "tags": ["baseline"]}``.
        output: as for :class:`CSVLogger`.
        every: as for :class:`CSVLogger`.
        prefix: as for :class:`CSVLogger`.

    Raises:
        ImportError: wandb is not installed.

    Example:
        >>> log = WandbLogger("digits", mode="offline", output="loss")
        >>> log.attach(trainer)
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        directory: str | os.PathLike[str] | None = None,
        mode: str | None = None,
        run_id: str | None = None,
        hparams: Mapping[str, Any] | None = None,
        init: Mapping[str, Any] | None = None,
        output: Output = None,
        every: int = 100,
        prefix: str | None = None,
    ) -> None:
        super().__init__(run_id, hparams, output=output, every=every, prefix=prefix)
        if mode not in (None, "online", "offline", "disabled"):
            raise ValueError(f"mode={mode!r}: 'online', 'offline', 'disabled' or None was wanted")
        self._project, self._name, self._directory = project, name, directory
        self._mode = mode
        self._init = dict(init or {})
        self._wandb = import_optional("wandb", user="WandbLogger", extra="wandb")
        self._run: Any = None

    @property
    def run(self) -> Any:
        """The ``wandb.Run``, for images, tables and the like; None while nothing is written, and on other ranks."""
        return self._run

    def _is_offline(self) -> bool:
        return (self._mode or os.environ.get("WANDB_MODE")) == "offline"

    def _open(self, engine: Engine, is_training: bool) -> None:
        arguments: dict[str, Any] = {"project": self._project, "name": self._name, "mode": self._mode}
        if self._directory is not None:
            os.makedirs(self._directory, exist_ok=True)
            arguments["dir"] = os.fspath(self._directory)
        if self._run_id is not None:
            arguments |= {"id": self._run_id, "resume": "allow"}
        with _no_reporting() if self._is_offline() else nullcontext():
            self._run = self._wandb.init(config=self._hparams, reinit="create_new", **(arguments | self._init))
        self._run_id = self._run.id

    def _write(self, counts: Counts, numbers: Mapping[str, int | float]) -> None:
        self._run.log(dict(numbers), step=counts.iteration)

    def _flush(self) -> None:
        """Do nothing: the client sends by itself."""

    def _close(self, ending: str) -> None:
        run, self._run = self._run, None
        run.finish(exit_code=0 if ending in ("completed", "terminated") else 1)
        # the process that the client started serves all its runs of this process
        if self._is_offline() and getattr(self._wandb.setup(), "most_recent_active_run", None) is None:
            self._wandb.teardown()

    def __repr__(self) -> str:
        """Show where it writes, and what."""
        return f"WandbLogger({self._project!r}, mode={self._mode!r}, {self._shown()})"


@contextmanager
def _no_reporting() -> Iterator[None]:
    """Let the client start without reports about itself, for which it connects even where it is offline."""
    before = os.environ.get(_REPORTING)
    os.environ[_REPORTING] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_REPORTING]
        else:
            os.environ[_REPORTING] = before
