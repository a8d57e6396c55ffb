from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest
import torch
from ignite.metrics import Average

from pellucid.engine import CheckpointError, Engine, Events, MetricError
from pellucid.handlers import History, Validate


def recording_engine(values=lambda state: {"loss": 1.0 / state.iteration}, event=Events.ITERATION_COMPLETED):
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(event, lambda engine, batch: engine.record(values(engine.state)))
    return engine


def trained_history(epochs=2):
    """Loss in each of 4 iterations, validation after each epoch."""
    trainer = recording_engine()
    evaluator = Engine(lambda engine, batch: batch, mode="eval", metrics={"loss": Average(), "accuracy": Average()})
    Validate(evaluator, [0.25, 0.75]).attach(trainer)
    history = History().attach(trainer)
    trainer.run(range(4), max_epochs=epochs)
    return history


def test_every_record_is_a_row_in_order():
    history = trained_history(epochs=1)
    assert [tuple(row) for row in history] == [
        (1, 1, 0, "loss", 1.0),
        (1, 2, 0, "loss", 0.5),
        (1, 3, 0, "loss", 1.0 / 3),
        (1, 4, 0, "loss", 0.25),
        (1, 4, 0, "val/loss", 0.5),
        (1, 4, 0, "val/accuracy", 0.5),
    ]


def test_it_is_used_as_a_list():
    history = trained_history(epochs=1)
    assert len(history) == 6
    assert history[0].name == "loss"
    assert [row.name for row in history[-2:]] == ["val/loss", "val/accuracy"]
    assert history.names == ("loss", "val/loss", "val/accuracy")
    assert history.rows == tuple(history)


def test_validation_points_sit_at_the_outer_iteration_and_later_runs_rewrite_nothing():
    trainer, evaluator = recording_engine(), recording_engine(lambda state: {"score": float(state.iteration)})
    evaluator = Engine(lambda engine, batch: batch, mode="eval", metrics={"score": Average()})
    Validate(evaluator, [1.0], every=Events.ITERATION_COMPLETED(every=3)).attach(trainer)
    history = History().attach(trainer)
    trainer.run(range(10), max_epochs=1)
    before = history.rows
    evaluator.run([99.0])
    trainer.run(range(10), max_epochs=2)
    iterations = [row.iteration for row in history]
    assert history.rows[: len(before)] == before
    assert iterations == sorted(iterations)
    assert [row.iteration for row in before if row.name == "val/score"] == [3, 6, 9]


def test_rows_of_an_inner_run_carry_the_outer_counts():
    trainer = Engine(lambda engine, batch: None)
    evaluator = Engine(lambda engine, batch: batch, mode="eval", metrics={"score": Average()})
    history = History().attach(evaluator)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, batch: evaluator.run([1.0, 2.0]) and None)
    trainer.run(range(5), max_epochs=2)
    assert [tuple(row) for row in history] == [(1, 5, 0, "score", 1.5), (2, 10, 0, "score", 1.5)]


def test_a_tensor_is_read_only_when_asked_and_once():
    class Counted(torch.Tensor):
        reads = 0

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            names = ("item", "__float__", "__bool__", "__int__", "tolist", "cpu", "numpy")
            Counted.reads += getattr(function, "__name__", "") in names
            return super().__torch_function__(function, types, args, kwargs or {})

    trainer = recording_engine(lambda state: {"loss": torch.tensor(0.5).as_subclass(Counted)})
    history = History().attach(trainer)
    trainer.run(range(300), max_epochs=1)
    assert Counted.reads == 0
    assert {row.value for row in history} == {0.5}
    assert {type(row.value) for row in history.rows} == {float}
    assert Counted.reads == 300


def test_a_tensor_that_is_changed_in_place_afterwards_changes_no_row():
    running = torch.zeros(())
    trainer = recording_engine(lambda state: {"loss": running.add_(1)})
    history = History().attach(trainer)
    trainer.run(range(600), max_epochs=1)
    assert [row.value for row in history] == list(range(1, 601))


def test_no_row_keeps_a_graph_or_the_tensor_it_was_cut_from():
    weight, alive = torch.ones(1000, requires_grad=True), []

    def values(state):
        activation = weight * 2
        alive.append(weakref.ref(activation))
        return {"loss": activation.sum(), "first": activation[0]}

    trainer = recording_engine(values)
    history = History().attach(trainer)
    trainer.run(range(3), max_epochs=1)
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3
    assert [row.value for row in history if row.name == "loss"] == [2000.0] * 3


def test_values_that_are_no_scalars_stay_what_they_are():
    trainer = recording_engine(lambda state: {"matrix": torch.eye(2), "count": 3})
    history = History().attach(trainer)
    trainer.run([0], max_epochs=1)
    assert torch.equal(history[0].value, torch.eye(2))
    assert history[1].value == 3
    assert isinstance(history[1].value, int)


def test_memory_grows_with_records_and_not_with_iterations():
    trainer = recording_engine(event=Events.ITERATION_COMPLETED(every=100))
    history = History().attach(trainer)
    trainer.run(range(1000), max_epochs=1)
    assert len(history) == 10


@pytest.mark.parametrize("cut", [1, 5, 8])
def test_a_history_cut_and_resumed_in_a_new_object_equals_one_of_one_go(cut):
    trainer = recording_engine(lambda state: {"loss": torch.tensor(float(state.iteration))})
    whole, first = History().attach(trainer), History().attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=cut), lambda engine, batch: engine.terminate())
    trainer.run(range(4), max_epochs=2)
    first.detach(trainer)
    resumed = History().attach(trainer)
    resumed.load_state_dict(first.state_dict())
    trainer.run(range(4), max_epochs=2)
    assert len(whole) == 8
    assert resumed.rows == whole.rows


def test_its_state_is_safe_to_load(tmp_path):
    trainer = recording_engine(lambda state: {"a": 1, "b": np.float32(0.5), "c": torch.tensor(2.0), "d": np.ones(2)})
    history = History().attach(trainer)
    trainer.run([0], max_epochs=1)
    torch.save(history.state_dict(), tmp_path / "history.pt")
    other = History()
    other.load_state_dict(torch.load(tmp_path / "history.pt", weights_only=True))
    assert other[:3] == history[:3]
    assert other[3].value.tolist() == [1, 1]


@pytest.mark.parametrize("state", [{}, {"rows": [[1, 2, 3]]}, {"rows": [], "more": 1}])
def test_a_state_that_does_not_fit_is_refused(state):
    history = trained_history()
    before = history.rows
    with pytest.raises(CheckpointError, match="rows"):
        history.load_state_dict(state)
    assert history.rows == before


def test_to_pandas_has_one_row_for_each_moment():
    frame = trained_history().to_pandas()
    assert list(frame.columns) == ["epoch", "iteration", "updates", "loss", "val/loss", "val/accuracy"]
    assert list(frame["iteration"]) == list(range(1, 9))
    assert list(frame["val/loss"].dropna()) == [0.5, 0.5]


def test_to_pandas_loses_no_value_recorded_twice_at_one_moment():
    trainer = recording_engine(event=Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED)
    history = History().attach(trainer)
    trainer.run([0, 1], max_epochs=1)
    assert list(history.to_pandas()["loss"]) == [1.0, 0.5, 0.5]


def test_an_empty_history_is_an_empty_frame():
    assert History().to_pandas().shape == (0, 3)


def test_curves_of_one_base_name_share_axes():
    figure = trained_history().plot(title="Digits")
    labels = [[line.get_label() for line in axes.get_lines()] for axes in figure.axes]
    assert labels == [["loss", "val/loss"], ["val/accuracy"]]
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"iteration"}
    assert figure.get_suptitle() == "Digits"


def test_named_curves_are_drawn_into_given_axes():
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.add_subplot()
    drawn = trained_history().plot("val/loss", "val/accuracy", x="epoch", ax=axes)
    assert drawn is figure
    assert [list(line.get_xdata()) for line in axes.get_lines()] == [[1, 2], [1, 2]]
    assert axes.get_xlabel() == "epoch"


def test_values_at_one_place_are_drawn_as_their_mean():
    (axes,) = trained_history(epochs=1).plot("loss", x="epoch").axes
    assert list(axes.get_lines()[0].get_xydata()[0]) == [1, pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)]


def test_curves_of_one_picture_share_their_x_axis_and_no_legend_hides_any():
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = trained_history().plot(title="Digits")
    FigureCanvasAgg(figure).draw()
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    for axes in figure.axes:
        legend = axes.get_legend().get_window_extent()
        assert legend.y0 >= axes.get_window_extent().y1
        assert legend.y1 < figure.texts[0].get_window_extent().y0
        assert not legend.overlaps(axes.yaxis.get_tightbbox())


def test_it_can_be_drawn_into_axes_with_a_logarithmic_scale():
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    axes.set_yscale("log")
    trained_history().plot("loss", ax=axes)
    assert axes.get_yscale() == "log"


def test_plotting_leaves_nothing_behind_in_pyplot():
    from matplotlib import pyplot

    trained_history().plot()
    assert pyplot.get_fignums() == []


def test_a_plot_shows_itself_in_a_notebook():
    assert trained_history().plot()._repr_png_().startswith(b"\x89PNG")


def test_plotting_what_was_not_recorded_is_an_error():
    history = trained_history()
    with pytest.raises(MetricError, match="did you mean 'val/loss'"):
        history.plot("val/los")
    with pytest.raises(MetricError, match="nothing to draw"):
        History().plot()
    with pytest.raises(ValueError, match="x='time'"):
        history.plot(x="time")


def test_plotting_a_matrix_by_name_is_an_error_and_without_names_it_is_left_out():
    trainer = recording_engine(lambda state: {"matrix": torch.eye(2), "loss": 1.0})
    history = History().attach(trainer)
    trainer.run([0], max_epochs=1)
    assert len(history.plot().axes) == 1
    with pytest.raises(MetricError, match="'matrix': only scalar"):
        history.plot("matrix")


@pytest.mark.parametrize(
    ("package", "use"), [("pandas", History.to_pandas), ("matplotlib.axes", lambda history: history.plot())]
)
def test_an_absent_package_is_named_with_the_command_that_installs_it(package, use, monkeypatch):
    monkeypatch.delitem(sys.modules, "pellucid.handlers._curves", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'pellucid\[notebook\]'"):
        use(trained_history())


def test_a_notebook_shows_the_latest_rows():
    text = trained_history()._repr_html_()
    assert text.count("<tr>") == 9
    assert "val/accuracy" in text
    assert "0.1667" in text


def test_a_detached_history_grows_no_more():
    trainer = recording_engine()
    history = History().attach(trainer)
    trainer.run([0], max_epochs=1)
    history.detach(trainer)
    trainer.run([0], max_epochs=2)
    assert len(history) == 1
