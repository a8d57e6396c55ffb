from __future__ import annotations

import io
import logging
import re
import textwrap

import nbclient
import nbformat
import pytest
import torch
from ignite.metrics import Average
from tqdm import tqdm

from pellucid.engine import Engine, Events, HandlerError, MonitorError, SingleDevice
from pellucid.handlers import ProgressBar, Validate


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True

    def frames(self):
        """What was drawn, one text for each time the line was drawn anew."""
        return [frame.strip() for frame in re.split(r"[\r\n]|\x1b\[A", self.getvalue()) if frame.strip()]

    def counts(self):
        """The counts drawn, such as 3/10."""
        return [found[0] for frame in self.frames() if (found := re.findall(r"\d+/\d+(?= \[)", frame))]


def make_engine(step=lambda engine, batch: {"loss": 0.5}, name="train", **arguments):
    return Engine(step, name=name, **arguments)


def make_evaluator():
    return Engine(lambda engine, batch: batch, mode="eval", metrics={"mean": Average()}, name="eval")


def raise_at(iteration, error):
    def step(engine, batch):
        if engine.state.iteration == iteration:
            raise error

    return step


def bar(file, **arguments):
    return ProgressBar(file=file, min_interval_sec=0, **arguments)


def lines(file):
    return file.getvalue().splitlines()


def test_in_a_file_each_epoch_is_one_line_with_its_count():
    file, engine = io.StringIO(), make_engine()
    bar(file, output=["loss"], every=3).attach(engine)
    engine.run(range(10), max_epochs=2)
    assert len(lines(file)) == file.getvalue().count("\n") == 2
    assert re.fullmatch(r"train epoch 1/2: 100% 10/10 \[00:00<00:00, .*it/s, loss=0\.5\]", lines(file)[0])
    assert lines(file)[1].startswith("train epoch 2/2: 100% 10/10")


def test_a_terminal_shows_every_nth_iteration_and_at_last_the_total():
    file, engine = Terminal(), make_engine()
    bar(file, every=3).attach(engine)
    engine.run(range(10), max_epochs=1)
    assert list(dict.fromkeys(file.counts())) == ["0/10", "3/10", "6/10", "9/10", "10/10"]
    assert file.getvalue().count("\n") == 1


def test_the_bar_is_redrawn_no_more_often_than_the_interval():
    file, engine = Terminal(), make_engine()
    ProgressBar(file=file, min_interval_sec=1000).attach(engine)
    engine.run(range(1000), max_epochs=1)
    assert list(dict.fromkeys(file.counts())) == ["0/1000", "1000/1000"]


def test_a_validation_twice_per_epoch_leaves_one_line_for_each_bar_in_a_file():
    file, trainer, evaluator = io.StringIO(), make_engine(), make_evaluator()
    bar(file, every=3).attach(trainer)
    bar(file, every=3).attach(evaluator)
    Validate(evaluator, [1.0] * 4, every=Events.ITERATION_COMPLETED(every=5)).attach(trainer)
    trainer.run(range(10), max_epochs=2)
    counts = [re.search(r"(\w+).* (\d+/\d+) ", line).groups() for line in lines(file)]
    assert counts == [("eval", "4/4"), ("eval", "4/4"), ("train", "10/10")] * 2


def test_on_a_terminal_an_inner_bar_has_its_own_line_and_vanishes():
    file, trainer, evaluator = Terminal(), make_engine(), make_evaluator()
    bar(file).attach(trainer)
    bar(file).attach(evaluator)
    Validate(evaluator, [1.0] * 4).attach(trainer)
    trainer.run(range(10), max_epochs=2)
    inner = [frame for frame in re.split(r"\r", file.getvalue()) if "eval" in frame]
    assert inner
    left = screen(file.getvalue())
    assert [re.search(r"\w+ epoch \d", line).group() for line in left] == ["train epoch 1", "train epoch 2"]
    assert all("10/10" in line and "val/mean=1" in line for line in left)


def screen(text):
    """The lines that a terminal shows at the end."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[A|\r|\n|[^\x1b\r\n]+", text):
        if part == "\x1b[A":
            row -= 1
        elif part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            rows += [""] * (row == len(rows))
        else:
            rows[row] = rows[row].ljust(column)[:column] + part + rows[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in rows if line.strip()]


@pytest.mark.parametrize("first", ["bar", "validation"])
def test_metrics_of_the_epoch_stand_in_its_bar_whatever_the_order_of_attaching(first):
    file, trainer = io.StringIO(), make_engine()
    handlers = [bar(file), Validate(make_evaluator(), lambda state: [float(state.parent.epoch)])]
    for handler in handlers if first == "bar" else reversed(handlers):
        handler.attach(trainer)
    trainer.run(range(3), max_epochs=2)
    assert "val/mean=1]" in lines(file)[0]
    assert "val/mean=2]" in lines(file)[1]


@pytest.mark.parametrize("file", [io.StringIO(), Terminal()])
@pytest.mark.parametrize("error", [ValueError("of the user"), KeyboardInterrupt()])
def test_an_error_closes_the_bar(file, error):
    engine = make_engine(raise_at(4, error))
    bar(file).attach(engine)
    with pytest.raises(type(error)):
        engine.run(range(10), max_epochs=1)
    assert not tqdm._instances
    assert "3/10" in lines(file)[-1]
    assert file.getvalue().endswith("\n")


def test_an_interrupt_in_an_inner_run_closes_the_bars_of_all_runs():
    file, trainer = Terminal(), make_engine()
    evaluator = make_engine(raise_at(2, KeyboardInterrupt()), name="eval", mode="eval")
    bar(file).attach(trainer)
    bar(file).attach(evaluator)
    Validate(evaluator, range(5), every=Events.ITERATION_COMPLETED(every=3)).attach(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(range(10), max_epochs=1)
    assert not tqdm._instances
    assert [line.split(":")[0] for line in screen(file.getvalue())] == ["train epoch 1/1"]


@pytest.mark.parametrize(
    "stop",
    [
        lambda engine: engine.terminate(),
        lambda engine: engine.terminate(skip_completed=True),
        lambda engine: engine.interrupt(),
    ],
)
def test_a_stop_closes_the_bar_and_the_resumed_bar_starts_at_its_offset(stop):
    file = Terminal()
    engine = make_engine(lambda engine, batch: stop(engine) if engine.state.iteration == 4 else None)
    bar(file).attach(engine)
    engine.run(range(10), max_epochs=1)
    assert not tqdm._instances
    assert file.counts()[-1] == "4/10"
    drawn = len(file.counts())
    engine.run(range(10), max_epochs=1)
    resumed = file.counts()[drawn:]
    assert (resumed[0], resumed[-1]) == ("4/10", "10/10")
    assert not tqdm._instances


def test_an_epoch_that_is_ended_early_ends_at_its_true_count():
    file = io.StringIO()
    engine = make_engine(lambda engine, batch: engine.terminate_epoch() if engine.state.iteration == 4 else None)
    bar(file).attach(engine)
    engine.run(range(10), max_epochs=1)
    assert "100% 4/4 " in lines(file)[0]


class Stated:
    """Data that states one length and holds another."""

    def __init__(self, stated, held):
        self.stated, self.held = stated, held

    def __len__(self):
        return self.stated

    def __iter__(self):
        return iter(range(self.held))


@pytest.mark.parametrize("make_file", [io.StringIO, Terminal])
@pytest.mark.parametrize("stated", [10, 4])
def test_a_length_that_proves_wrong_gives_way_to_the_true_count(stated, make_file):
    file, engine = make_file(), make_engine()
    bar(file).attach(engine)
    engine.run(Stated(stated, 6), max_epochs=1)
    assert "100%" in lines(file)[-1]
    assert "6/6 [" in lines(file)[-1]


def test_an_unknown_length_is_shown_without_a_total():
    file, engine = Terminal(), make_engine()
    bar(file).attach(engine)
    engine.run(lambda state: iter(range(5)), max_epochs=1)
    assert any("3it [" in frame and "%" not in frame for frame in file.frames())
    assert file.counts()[-1] == "5/5"


class Counted(torch.Tensor):
    """A tensor that counts how often somebody reads it."""

    reads = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        names = ("item", "__float__", "__bool__", "__int__", "tolist", "cpu", "numpy")
        Counted.reads += getattr(function, "__name__", "") in names
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize(
    ("handler", "reads"),
    [
        (ProgressBar(output=["loss"], every=10, min_interval_sec=0, file=Terminal()), 10),
        (ProgressBar(output=["loss"], every=10, min_interval_sec=0, file=io.StringIO()), 1),
        (ProgressBar(file=Terminal()), 0),
    ],
)
def test_the_output_is_read_only_when_the_bar_is_drawn(handler, reads, monkeypatch):
    monkeypatch.setattr(Counted, "reads", 0)
    engine = make_engine(lambda engine, batch: {"loss": torch.tensor(0.5).as_subclass(Counted)})
    handler.attach(engine)
    engine.run(range(100), max_epochs=1)
    assert Counted.reads == reads


@pytest.mark.parametrize(
    ("output", "names", "text"),
    [
        ({"loss": torch.tensor(0.123456), "other": 1}, ["loss"], "loss=0.1235]"),
        (torch.tensor(2), ["loss"], "loss=2]"),
        ((0.5, 7), ["loss", "n"], "loss=0.5, n=7]"),
    ],
)
def test_values_of_the_output_are_found_by_name_or_position(output, names, text):
    file, engine = io.StringIO(), make_engine(lambda engine, batch: output)
    bar(file, output=names).attach(engine)
    engine.run([0], max_epochs=1)
    assert lines(file)[0].endswith(text)


def test_an_output_that_lacks_the_name_is_an_error():
    file, engine = Terminal(), make_engine()
    bar(file, output=["los"]).attach(engine)
    with pytest.raises(MonitorError, match=r"has no \['los'\], it has \['loss'\]"):
        engine.run([0, 1], max_epochs=1)
    assert not tqdm._instances


def test_chosen_metrics_are_shown_and_others_and_matrices_are_not():
    def shown(metrics):
        file, engine = io.StringIO(), make_engine()
        values = {"a": 1, "b": 0.25, "matrix": torch.eye(2)}
        engine.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, batch: engine.record(values))
        bar(file, metrics=metrics).attach(engine)
        engine.run([0], max_epochs=1)
        return lines(file)[0].split("it/s")[1]

    assert shown("all") == ", a=1, b=0.25]"
    assert shown(["b"]) == ", b=0.25]"
    assert shown(None) == "]"


def test_a_chosen_metric_that_nobody_records_is_reported(caplog):
    engine = make_engine()
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, batch: engine.record({"accuracy": 1.0}))
    bar(io.StringIO(), metrics=["acuracy"]).attach(engine)
    with caplog.at_level(logging.WARNING, logger="pellucid.handlers"):
        engine.run([0], max_epochs=3)
    assert caplog.text.count("did you mean 'accuracy'") == 1


def test_the_label_is_the_description_or_the_name_of_the_engine():
    def label(description=None, **arguments):
        file, engine = io.StringIO(), make_engine(**arguments)
        bar(file, description=description).attach(engine)
        engine.run([0], max_epochs=1)
        return lines(file)[0].split(":")[0]

    assert label() == "train epoch 1/1"
    assert label(description="fold 3") == "fold 3 epoch 1/1"
    assert label(name="digits", mode="eval") == "digits"


def test_bars_of_an_engine_run_again_and_again_do_not_pile_up():
    file, engine = Terminal(), make_evaluator()
    bar(file).attach(engine)
    for _ in range(5):
        engine.run([1.0, 2.0])
    assert file.getvalue().count("\n") == len(screen(file.getvalue())) == 5
    assert not tqdm._instances


def test_a_bar_that_is_not_to_be_left_vanishes():
    for file in (Terminal(), io.StringIO()):
        engine = make_engine()
        bar(file, leave=False).attach(engine)
        engine.run(range(3), max_epochs=2)
        assert screen(file.getvalue()) == []


def test_one_bar_may_be_attached_to_trainer_and_evaluator():
    file, trainer, evaluator = io.StringIO(), make_engine(), make_evaluator()
    shared = bar(file).attach(trainer)
    shared.attach(evaluator)
    Validate(evaluator, [1.0] * 2).attach(trainer)
    trainer.run(range(3), max_epochs=1)
    assert [line.split(":")[0] for line in lines(file)] == ["eval", "train epoch 1/1"]
    with pytest.raises(HandlerError, match="already"):
        shared.attach(trainer)


def test_only_rank_0_draws():
    class SecondRank(SingleDevice):
        rank = 1

    for file in (Terminal(), io.StringIO()):
        engine = make_engine(strategy=SecondRank())
        bar(file, output=["loss"]).attach(engine)
        engine.run(range(3), max_epochs=2)
        assert file.getvalue() == ""


def test_in_a_notebook_the_widget_ends_at_the_true_count():
    code = """
        from pellucid.engine import Engine
        from pellucid.handlers import ProgressBar

        class Stated(list):
            def __len__(self):
                return 10

        engine = Engine(lambda engine, batch: None)
        ProgressBar(every=3).attach(engine)
        result = engine.run(Stated(range(7)), max_epochs=1)
    """
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(code))])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    widgets = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    (bar_state,) = [widget["state"] for widget in widgets if widget["model_name"] == "FloatProgressModel"]
    assert (bar_state["value"], bar_state["max"], bar_state["bar_style"]) == (7, 7, "success")


def test_it_starts_no_thread():
    import threading

    before = threading.active_count()
    engine = make_engine()
    bar(Terminal()).attach(engine)
    engine.run(range(3), max_epochs=1)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ValueError, "every=0"),
        ({"every": 0.5}, TypeError, "every=0.5"),
        ({"min_interval_sec": -1}, ValueError, "min_interval_sec=-1"),
        ({"metrics": "loss"}, TypeError, "metrics='loss'"),
        ({"output": "loss"}, TypeError, "output='loss'"),
        ({"output": [1]}, TypeError, r"output=\[1\]"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        ProgressBar(**arguments)


def test_a_detached_bar_draws_no_more():
    file, engine = io.StringIO(), make_engine()
    handler = bar(file).attach(engine)
    engine.run([0], max_epochs=1)
    handler.detach(engine)
    engine.run([0], max_epochs=2)
    assert len(lines(file)) == 1
