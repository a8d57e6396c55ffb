"""Write recorded metrics and outputs into a CSV file."""

from __future__ import annotations

import csv
import io

from ._file_logger import FileLogger
from ._logger import Counts

__all__ = ["CSVLogger"]


class CSVLogger(FileLogger):
    """Append every number to a CSV file with the columns ``epoch,iteration,updates,name,value``.

    One line is one number, so names may come later: ``pandas.read_csv(path)`` reads it, and
    ``.pivot_table(index="iteration", columns="name", values="value")`` makes a column of each name.

    A line is with the system when it is written, so a killed process leaves at most half a line, which the next run
    cuts off. A run resumed from a checkpoint goes on in the same file; lines that it will write again are set aside
    into ``metrics.1.csv`` first, as is the whole file where another training begins. An evaluation on its own only
    appends. Only rank 0 writes.

    Args:
        path: the file.
        output: values of the training step's output: a name, several, or a function of the output that returns names
            and numbers. Names are keys if the output is a mapping, places if it is a tuple of as many values.
        every: write the output at every n-th iteration, which waits for the device.
        prefix: stands before the names of output values. None: the engine's name, as in ``train/loss``.

    Raises:
        ValueError: ``path`` is a file of another kind.

    Example:
        >>> log = CSVLogger("runs/digits/metrics.csv", output="loss", every=1).attach(trainer)
        >>> result = trainer.run(loader, max_epochs=1)
        >>> print(log.path.read_text())
        epoch,iteration,updates,name,value
        1,1,1,train/loss,...
    """

    _header = "epoch,iteration,updates,name,value\n"

    def _line(self, counts: Counts, name: str, value: int | float) -> str:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow([*counts, " ".join(name.splitlines()), value])
        return line.getvalue()

    def _parse(self, line: str) -> Counts:
        epoch, iteration, updates = next(csv.reader([line]))[:3]
        return Counts(int(epoch), int(iteration), int(updates))
