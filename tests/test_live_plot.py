from __future__ import annotations

import sys

import nbclient
import pytest
import torch
from ignite.metrics import Average
from matplotlib import pyplot
from nbformat.v4 import new_code_cell, new_notebook
from training import Training, assert_equal_to_the_bit

from pellucid.engine import Engine, Events
from pellucid.handlers import LivePlot, Validate


def recording_engine(step=lambda engine, batch: engine.record({"loss": 1.0 / engine.state.iteration})):
    return Engine(step, name="train")


def points(plot, name):
    """What the picture shows of a name."""
    (line,) = [line for axes in plot.figure.axes for line in axes.get_lines() if line.get_label() == name]
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


# ---------------------------------------------------------------------- in a script


def test_without_a_notebook_and_a_path_nothing_is_drawn_or_read():
    class Unreadable(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            assert getattr(function, "__name__", "") not in ("item", "__float__", "tolist", "cpu", "numpy")
            return super().__torch_function__(function, types, args, kwargs or {})

    engine = recording_engine(lambda engine, batch: engine.record({"loss": torch.ones(()).as_subclass(Unreadable)}))
    plot = LivePlot(every=Events.ITERATION_COMPLETED, min_interval_sec=0).attach(engine)
    engine.run(range(3))
    assert (plot.figure, len(plot)) == (None, 3)


def test_the_picture_is_a_file_and_shows_everything_at_the_end(tmp_path):
    engine = recording_engine()
    plot = LivePlot(path=tmp_path / "new" / "curves.png", min_interval_sec=1000).attach(engine)
    engine.run(range(3), max_epochs=2)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["curves.png"]
    assert (tmp_path / "new" / "curves.png").read_bytes() == plot.figure._repr_png_()
    assert points(plot, "loss") == [(iteration, 1 / iteration) for iteration in range(1, 7)]
    assert plot.figure.get_suptitle() == "train: epoch 2 of 2, iteration 6"
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize("first", ["plot", "validation"])
def test_a_validation_at_the_same_event_is_in_the_picture_whatever_the_order_of_attaching(first, tmp_path):
    engine, seen = recording_engine(), []
    evaluator = Engine(lambda engine, batch: batch, mode="eval", metrics={"loss": Average()})
    plot = LivePlot(path=tmp_path / "{epoch}.png", min_interval_sec=0)
    handlers = [plot, Validate(evaluator, [0.5, 1.5])]
    for handler in handlers if first == "plot" else reversed(handlers):
        handler.attach(engine)
    engine.add_event_handler(Events.EPOCH_STARTED(once=2), lambda engine, batch: seen.extend(points(plot, "val/loss")))
    engine.run(range(3), max_epochs=2)
    assert seen == [(3, 1.0)]
    assert points(plot, "val/loss") == [(3, 1.0), (6, 1.0)]


def test_only_what_is_named_is_drawn_over_what_is_wanted(tmp_path):
    engine = recording_engine(lambda engine, batch: engine.record({"loss": 1.0, "norm": 2.0, "matrix": torch.eye(2)}))
    plot = LivePlot("norm", x="epoch", path=tmp_path / "curves.svg").attach(engine)
    everything = LivePlot(path=tmp_path / "all.png").attach(engine)
    engine.run([0], max_epochs=3)
    assert [axes.get_ylabel() for axes in plot.figure.axes] == ["norm"]
    assert points(plot, "norm") == [(1, 2), (2, 2), (3, 2)]
    assert [axes.get_ylabel() for axes in everything.figure.axes] == ["loss", "norm"]


def test_a_name_that_is_never_recorded_is_told_at_the_end(tmp_path, caplog):
    engine = recording_engine()
    plot = LivePlot("lose", path=tmp_path / "curves.png").attach(engine)
    engine.run([0])
    assert "nobody has recorded 'lose': did you mean 'loss'?" in caplog.text
    assert plot.figure is None


def test_it_is_drawn_no_more_often_than_the_interval(tmp_path):
    engine, drawn = recording_engine(), []
    plot = LivePlot(every=Events.ITERATION_COMPLETED, path=tmp_path / "{iteration}.png", min_interval_sec=1000)
    plot.attach(engine)
    engine.run(range(50))
    drawn = sorted(int(path.stem) for path in tmp_path.iterdir())
    assert drawn == [1, 50]


def test_drawing_takes_a_tenth_of_the_time(tmp_path):
    engine = recording_engine()
    plot = LivePlot(every=Events.ITERATION_COMPLETED, path=tmp_path / "{iteration}.png", min_interval_sec=0)
    plot.attach(engine)
    engine.run(range(200))  # they are done long before the second picture is due
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("error", [ValueError("of the user"), KeyboardInterrupt()])
def test_after_an_error_the_picture_shows_what_there_was(error, tmp_path):
    def step(engine, batch):
        if engine.state.iteration == 4:
            raise error
        engine.record({"loss": torch.tensor(2.0)})

    engine = recording_engine(step)
    plot = LivePlot(path=tmp_path / "curves.png").attach(engine)
    with pytest.raises(type(error)):
        engine.run(range(9))
    assert points(plot, "loss") == [(1, 2), (2, 2), (3, 2)]
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize(
    "stop", [lambda engine: engine.terminate(skip_completed=True), lambda engine: engine.interrupt()]
)
def test_after_a_stop_the_picture_shows_what_there_was_and_goes_on_with_the_run(stop, tmp_path):
    engine = recording_engine()
    plot = LivePlot(path=tmp_path / "curves.png").attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda engine, batch: stop(engine))
    engine.run(range(5))
    assert len(points(plot, "loss")) == 3
    engine.run(range(5))
    assert len(points(plot, "loss")) == 5


def test_an_inner_run_is_not_the_end(tmp_path):
    engine = recording_engine()
    evaluator = Engine(lambda engine, batch: batch, mode="eval", metrics={"score": Average()})
    plot = LivePlot(path=tmp_path / "{iteration}.png", min_interval_sec=1000).attach(engine).attach(evaluator)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: evaluator.run([1.0]))
    engine.run(range(4))
    assert points(plot, "score") == [(iteration, 1.0) for iteration in range(1, 5)]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_resumed_plot_has_what_was_before(tmp_path):
    engine = recording_engine()
    first = LivePlot().attach(engine)
    engine.run(range(3))
    first.detach(engine)
    plot = LivePlot(path=tmp_path / "curves.png").attach(engine)
    plot.load_state_dict(first.state_dict())
    engine.run(range(3), max_epochs=2)
    assert len(points(plot, "loss")) == 6


def test_the_training_is_bit_identical_with_and_without_it(tmp_path):
    watched, alone = (
        Training("global noise").at(Events.ITERATION_COMPLETED, lambda training, engine: engine.record({"loss": 1}))
        for _ in range(2)
    )
    LivePlot(every=Events.ITERATION_COMPLETED, path=tmp_path / "curves.png", min_interval_sec=0).attach(watched.engine)
    assert_equal_to_the_bit(watched.run(2).outcome(), alone.run(2).outcome())
    assert (tmp_path / "curves.png").exists()


# ---------------------------------------------------------------------- in a notebook

MAKE = """
from pellucid.engine import Engine, Events
from pellucid.handlers import LivePlot

def step(engine, batch):
    if batch == bad:
        raise KeyboardInterrupt
    engine.record({"loss": 1.0 / engine.state.iteration})

bad = None
engine = Engine(step, name="mine")
plot = LivePlot(every=Events.ITERATION_COMPLETED, min_interval_sec=0).attach(engine)
"""


@pytest.fixture(scope="module")
def kernel():
    running = nbclient.NotebookClient(new_notebook(), kernel_name="python3", timeout=300, allow_errors=True)
    with running.setup_kernel():
        yield running


@pytest.fixture
def cell(kernel):
    """Run source as a cell; what it left there, and how often a picture was sent in its place."""

    def run(source):
        made, updates = new_code_cell(source), []
        kernel.nb.cells.append(made)
        hear = kernel.process_message

        def hear_and_count(message, *others):
            updates.append(message["header"]["msg_type"] in ("display_data", "update_display_data"))
            return hear(message, *others)

        kernel.process_message = hear_and_count
        try:
            kernel.execute_cell(made, len(kernel.nb.cells) - 1)
        finally:
            kernel.process_message = hear
        return made.outputs, sum(updates)

    assert run(MAKE) == ([], 0)
    return run


def pictures(outputs):
    return [output.data["image/png"].strip() for output in outputs if "data" in output]


def test_in_a_notebook_the_curves_are_one_output_that_is_not_flooded(cell):
    outputs, sent = cell("result = engine.run(range(1000), max_epochs=1)")
    assert len(outputs) == len(pictures(outputs)) == 1
    assert 2 <= sent <= 6
    shown, _ = cell("len(plot.figure.axes[0].get_lines()[0].get_xdata()), plot.figure.get_suptitle()")
    assert shown[0].data["text/plain"] == "(1000, 'mine: epoch 1 of 1, iteration 1000')"


def test_it_is_redrawn_while_the_run_goes_on(cell):
    outputs, sent = cell("""
import time
engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: time.sleep(0.05))
plot.detach(engine); plot = LivePlot(every=Events.ITERATION_COMPLETED, min_interval_sec=0.2).attach(engine)
result = engine.run(range(100))
""")
    assert len(pictures(outputs)) == 1
    assert sent >= 3


@pytest.mark.parametrize("leave", ["", "bad = 5"])
def test_the_last_picture_stays_and_the_next_cell_has_its_own(cell, leave):
    first, _ = cell(f"{leave}\nresult = engine.run(range(9), max_epochs=1)")
    assert [output.output_type for output in first][:1] == ["display_data"]
    assert ("KeyboardInterrupt" in str(first)) == bool(leave)
    number, _ = cell("print(len(plot.figure.axes[0].get_lines()[0].get_xdata()))")
    assert number[0].text == ("5\n" if leave else "9\n")
    second, _ = cell("bad = None; result = engine.run(range(9), max_epochs=2)")
    assert len(pictures(first)) == len(pictures(second)) == 1
    assert pictures(first) != pictures(second)


def test_no_figure_is_left_open(cell):
    outputs, _ = cell("result = engine.run(range(9)); from matplotlib import pyplot; print(pyplot.get_fignums())")
    assert [output.get("text") for output in outputs if output.output_type == "stream"] == ["[]\n"]
    assert len(pictures(outputs)) == 1


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("names", "arguments", "error", "message"),
    [
        ((3,), {}, TypeError, r"names=\(3,\)"),
        ((), {"x": "time"}, ValueError, "x='time'"),
        ((), {"path": "curves.txt"}, ValueError, "one of the endings"),
        ((), {"min_interval_sec": -1}, ValueError, "min_interval_sec=-1"),
    ],
)
def test_bad_arguments_are_refused_at_once(names, arguments, error, message):
    with pytest.raises(error, match=message):
        LivePlot(*names, **arguments)


def test_without_matplotlib_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"LivePlot needs matplotlib.*pip install 'pellucid\[notebook\]'"):
        LivePlot()
