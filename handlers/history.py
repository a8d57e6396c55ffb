"""Everything an engine recorded, kept for looking at afterwards."""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from ..engine import CheckpointError, Engine, Events, MetricError
from ._attachable import Attachable, Subscription
from ._monitor import nearest_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["History", "HistoryRow"]

_PACK_AFTER = 256


class HistoryRow(NamedTuple):
    """One recorded value, and when it was recorded."""

    epoch: int
    iteration: int
    updates: int
    name: str
    value: Any


class History(Attachable):
    """Every value an engine records, as rows ``(epoch, iteration, updates, name, value)``.

    Use it as a list of :class:`HistoryRow`. It only grows: no later run rewrites a row. Rows of an inner run carry
    the outermost run's counts. Keeping them does not wait for the device: a tensor stays where it is, and is read
    when somebody asks for rows. A scalar reads as a Python number, a larger tensor as one on the CPU.

    Example:
        >>> Validate(evaluator, val_loader).attach(trainer)
        >>> history = History().attach(trainer)
        >>> result = trainer.run(loader, max_epochs=3)
        >>> history.plot("val/accuracy").savefig("curves.png")
    """

    def __init__(self) -> None:
        self._rows: list[HistoryRow] = []
        self._read_until = 0  # rows before this one are plain values
        self._packed_until = 0

    def subscriptions(self) -> Sequence[Subscription]:
        return ((Events.METRICS_RECORDED, self._keep),)

    def _keep(self, engine: Engine, batch: Any) -> None:
        state = engine.state
        record = state.last_record
        assert record is not None, "METRICS_RECORDED comes with a record"
        clock: Any = record
        while state.parent is not None:
            clock = state = state.parent
        for name, value in record.values.raw().items():
            self._rows.append(HistoryRow(clock.epoch, clock.iteration, clock.updates, name, value))
        if len(self._rows) - self._packed_until >= _PACK_AFTER:
            self._pack()

    def _pack(self) -> None:
        """Move waiting device scalars together: one by one each would hold a whole block of device memory."""
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index in range(self._packed_until, len(self._rows)):
            value = self._rows[index].value
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                groups.setdefault((value.device, value.dtype), []).append(index)
        for indices in groups.values():
            packed = torch.stack([self._rows[index].value for index in indices]).unbind()
            for index, value in zip(indices, packed, strict=True):
                self._rows[index] = self._rows[index]._replace(value=value)
        self._packed_until = len(self._rows)

    def _read(self) -> list[HistoryRow]:
        """Return the rows with every value read, each once. Waits for the device if any is still there."""
        for index in range(self._read_until, len(self._rows)):
            row = self._rows[index]
            self._rows[index] = row._replace(value=_plain(row.value))  # waits for the device
        self._read_until = self._packed_until = len(self._rows)
        return self._rows

    @property
    def rows(self) -> tuple[HistoryRow, ...]:
        """All rows so far, in the order they were recorded."""
        return tuple(self._read())

    @property
    def names(self) -> tuple[str, ...]:
        """The names recorded so far, in the order of their first record."""
        return tuple(dict.fromkeys(row.name for row in self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[HistoryRow]:
        return iter(self.rows)

    @overload
    def __getitem__(self, index: int) -> HistoryRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[HistoryRow]: ...
    def __getitem__(self, index: int | slice) -> HistoryRow | list[HistoryRow]:
        return self._read()[index]

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame``: columns epoch, iteration, updates, and one for each name.

        Values recorded at the same counts share a row; a name recorded twice at the same counts begins another.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(_install("to_pandas", "pandas")) from error
        return pandas.DataFrame(self._wide(), columns=["epoch", "iteration", "updates", *self.names])

    def _wide(self) -> list[dict[str, Any]]:
        table: list[dict[str, Any]] = []
        latest: dict[tuple[int, int, int], dict[str, Any]] = {}
        for row in self._read():
            counts = row[:3]
            line = latest.get(counts)
            if line is None or row.name in line:
                line = latest[counts] = dict(zip(HistoryRow._fields, counts, strict=False))
                table.append(line)
            line[row.name] = row.value
        return table

    def plot(
        self,
        *names: str,
        x: Literal["epoch", "iteration", "updates"] = "iteration",
        ax: Axes | None = None,
        title: str | None = None,
    ) -> Figure:
        """Draw the curves of ``names`` (none given: all that are scalar) and return the figure.

        Names of one base name, such as ``loss`` and ``val/loss``, share axes; with ``ax`` all go there. Values of a
        name that lie at one ``x`` are drawn as their mean. The figure is not kept by ``matplotlib.pyplot``: in a
        notebook it is shown where it is a cell's last value, and for ``pyplot.show()`` pass an ``ax`` made by pyplot.

        Raises:
            ImportError: matplotlib is not installed.
            MetricError: a name that was not recorded, or has no scalar value; or nothing was recorded.
        """
        try:
            from ._curves import draw
        except ImportError as error:
            raise ImportError(_install("plot", "matplotlib")) from error
        if x not in HistoryRow._fields[:3]:
            raise ValueError(f"x={x!r}: 'epoch', 'iteration' or 'updates' was wanted")
        curves = self._curves(names, HistoryRow._fields.index(x))
        return draw(curves, x_label=x, ax=ax, title=title)

    def _curves(self, names: Sequence[str], x_column: int) -> dict[str, list[tuple[int, float]]]:
        for name in names:
            if name not in self.names:
                raise MetricError(f"nothing was recorded as {name!r}{nearest_name(name, self.names)}")
        points: dict[str, dict[int, list[float]]] = {name: {} for name in names or self.names}
        for row in self._read():
            if row.name in points and isinstance(row.value, int | float):
                points[row.name].setdefault((row.epoch, row.iteration, row.updates)[x_column], []).append(row.value)
        curves = {name: [(x, statistics.fmean(at_x)) for x, at_x in of.items()] for name, of in points.items()}
        empty = [name for name in names if not curves[name]]
        if empty:
            raise MetricError(f"{', '.join(map(repr, empty))}: only scalar values can be drawn as a curve")
        curves = {name: points for name, points in curves.items() if points}
        if not curves:
            raise MetricError("nothing to draw: no scalar was recorded since this History was attached")
        return curves

    def state_dict(self) -> dict[str, Any]:
        """Return all rows as lists of numbers, text and tensors. Waits for the device."""
        return {"rows": [[*row[:-1], _storable(row.value)] for row in self._read()]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the rows by those of an earlier ``state_dict()``.

        Raises:
            CheckpointError: it has other keys, or rows of another length.
        """
        fields = HistoryRow._fields
        if set(state_dict) != {"rows"} or any(len(row) != len(fields) for row in state_dict["rows"]):
            raise CheckpointError(f"History: one key 'rows' was wanted, with rows of {fields}, got {list(state_dict)}")
        self._rows = [HistoryRow(*row) for row in state_dict["rows"]]
        self._read_until = self._packed_until = len(self._rows)

    def __repr__(self) -> str:
        """Say how much there is, without reading it."""
        return f"History({len(self)} rows of {', '.join(self.names) or 'nothing'})"

    def _repr_html_(self) -> str:
        """Show the latest rows as a table."""
        columns = ["epoch", "iteration", "updates", *self.names]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        lines = [[_cell(line.get(name, "")) for name in columns] for line in self._wide()[-10:]]
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in lines)
        return f"<table><caption>{html.escape(repr(self))}</caption><tr>{head}</tr>{body}</table>"


def _plain(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _storable(value: Any) -> Any:
    """Return an array as a tensor, which loads without unpickling code."""
    return torch.as_tensor(value) if hasattr(value, "__array__") else value


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return html.escape(text)


def _install(method: str, package: str) -> str:
    return f"History.{method} needs {package}, which is not installed: pip install 'pellucid[notebook]'"
