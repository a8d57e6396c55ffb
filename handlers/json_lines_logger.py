"""Write recorded metrics and outputs into a file of JSON lines."""

from __future__ import annotations

import json

from ._file_logger import FileLogger
from ._logger import Counts

__all__ = ["JSONLinesLogger"]


class JSONLinesLogger(FileLogger):
    """Append every number to a file as one line of JSON, with the same keys as the columns of :class:`CSVLogger`.

    Read it line by line, or with ``pandas.read_json(path, lines=True)``. What is no finite number stands as ``NaN``,
    ``Infinity`` or ``-Infinity``, which Python and pandas read. For the rest it is as :class:`CSVLogger`.

    Args:
        path: the file.
        output: as for :class:`CSVLogger`.
        every: as for :class:`CSVLogger`.
        prefix: as for :class:`CSVLogger`.

    Example:
        >>> log = JSONLinesLogger("runs/digits/metrics.jsonl", output="loss", every=1).attach(trainer)
        >>> result = trainer.run(loader, max_epochs=1)
        >>> print(log.path.read_text())
        {"epoch": 1, "iteration": 1, "updates": 1, "name": "train/loss", "value": ...}
        ...
    """

    def _line(self, counts: Counts, name: str, value: int | float) -> str:
        return json.dumps({**counts._asdict(), "name": name, "value": value}) + "\n"

    def _parse(self, line: str) -> Counts:
        row = json.loads(line)
        return Counts(*(int(row[name]) for name in Counts._fields))
