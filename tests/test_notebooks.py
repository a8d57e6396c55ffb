"""The notebooks run whole, and the manners of engines in one: all in a real Jupyter kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
TIMEOUT_SEC = 300  # for one cell, on a machine that is busy with other things


def client(notebook: nbformat.NotebookNode, allow_errors: bool = False) -> NotebookClient:
    return NotebookClient(notebook, kernel_name="python3", timeout=TIMEOUT_SEC, allow_errors=allow_errors)


# ---- the notebooks


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS] == [
        "01_quickstart.ipynb",
        "02_updates.ipynb",
        "03_parallel.ipynb",
        "04_stop_and_resume.ipynb",
        "05_event_handlers.ipynb",
        "06_composing_engines.ipynb",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_notebook_runs_whole(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    client(notebook).execute(cwd=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_no_output_is_kept_in_the_file(path):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count, cell.metadata) == ([], None, {}), cell.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_last_cell_asserts_what_was_promised(path):
    assert "assert " in nbformat.read(path, as_version=4).cells[-1].source


# ---- manners


class Shown(NamedTuple):
    printed: str
    html: str
    error: str | None


Cell = Callable[[str], Shown]


@pytest.fixture(scope="module")
def kernel() -> Iterator[NotebookClient]:
    running = client(new_notebook(), allow_errors=True)
    with running.setup_kernel():
        yield running


@pytest.fixture
def cell(kernel) -> Cell:
    """Run source as a cell of the notebook, as often as wanted; each test finds a new engine that does nothing."""

    def run(source: str) -> Shown:
        made = new_code_cell(source)
        kernel.nb.cells.append(made)
        kernel.execute_cell(made, len(kernel.nb.cells) - 1)
        printed = "".join(output.text for output in made.outputs if output.output_type == "stream")
        html = "".join(output.data.get("text/html", "") for output in made.outputs if "data" in output)
        errors = [output.ename for output in made.outputs if output.output_type == "error"]
        return Shown(printed, html, errors[0] if errors else None)

    made = run("from pellucid.engine import Engine, Events\nengine = Engine(lambda engine, batch: None, name='mine')")
    assert made == ("", "", None)
    return run


STOP_BUTTON = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"  # what Jupyter's stop button sends


@pytest.mark.parametrize("stop", ["raise KeyboardInterrupt", STOP_BUTTON], ids=["raised", "button"])
@pytest.mark.parametrize("place", ["step", "handler"])
def test_after_an_interrupted_cell_the_next_one_goes_on_with_the_same_engine(cell, place, stop):
    assert cell(f"""
def stop():
    {stop}

def step(engine, batch):
    seen.append(batch)
    if batch == 5 and "{place}" == "step" and not stopped:
        stopped.append(True); stop()

seen, stopped = [], []
engine = Engine(step)

@engine.on(Events.ITERATION_COMPLETED(once=5))
def handler(engine, batch):
    if "{place}" == "handler":
        stop()

engine.run(range(1, 9), max_epochs=2)
""") == ("", "", "KeyboardInterrupt")  # fmt: skip
    assert cell("print(engine.state.stop_reason, engine.state.is_running)").printed == "interrupted False\n"
    went_on = cell("result = engine.run(range(1, 9), max_epochs=2); print(seen, result.iteration, result.stop_reason)")
    repeated = [5] if place == "step" else []  # a step that did not return has not used its batch
    assert went_on.printed == f"{[*range(1, 6), *repeated, *range(6, 9), *range(1, 9)]} 16 completed\n"


def test_after_an_inner_run_was_interrupted_the_next_cell_goes_on_with_both_engines(cell):
    stopped = cell("""
evaluator = Engine(lambda engine, batch: None, mode="eval")

@evaluator.on(Events.ITERATION_COMPLETED(once=2))
def stop(engine, batch):
    if engine.state.parent.iteration == 2:
        raise KeyboardInterrupt

engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: evaluator.run([1, 2]))
engine.run([1, 2, 3])
""")
    assert stopped.error == "KeyboardInterrupt"
    assert cell("print(evaluator.state.is_running, engine.state.is_running)").printed == "False False\n"
    assert cell("print(engine.run([1, 2, 3]).iteration, evaluator.state.stop_reason)").printed == "3 completed\n"


def test_a_cell_that_is_run_again_replaces_its_handler_and_says_so(cell):
    source = """
@engine.on(Events.STARTED)
def hello(engine, batch):
    print("hello")
"""
    assert cell(source).printed == ""
    assert "hello" in cell(source).printed
    assert cell("engine.run([1]);").printed == "hello\n"


def test_an_edited_cell_replaces_the_handler_of_the_same_name(cell):
    cell("@engine.on(Events.STARTED)\ndef hello(engine, batch):\n    print('hello')")
    cell("# more polite\n\n@engine.on(Events.STARTED)\ndef hello(engine, batch):\n    print('good morning')")
    assert cell("engine.run([1]);").printed == "good morning\n"


def test_handlers_of_one_name_are_replaced_only_on_their_own_event_and_engine(cell):
    cell("other = Engine(lambda engine, batch: None)")
    for event, target in (("STARTED", "engine"), ("COMPLETED", "engine"), ("STARTED", "other")):
        attached = cell(f"@{target}.on(Events.{event})\ndef hello(engine, batch):\n    print('{target} {event}')")
        assert attached.printed == ""
    assert cell("engine.run([1]); other.run([1]);").printed == "engine STARTED\nengine COMPLETED\nother STARTED\n"


def test_two_functions_of_one_name_in_one_cell_are_both_kept(cell):
    source = """
@engine.on(Events.STARTED)
def _(engine, batch):
    print("one")

@engine.on(Events.STARTED)
def _(engine, batch):
    print("two")
"""
    for _ in range(2):
        cell(source)
        assert cell("engine.reset(); engine.run([1]);").printed == "one\ntwo\n"


def test_closures_made_in_one_loop_are_all_kept_and_replaced_together(cell):
    source = """
def printer(text):
    def show(engine, batch):
        print(text)
    return show

for text in ("one", "two", "three"):
    engine.add_event_handler(Events.STARTED, printer(text))
    engine.add_event_handler(Events.STARTED, lambda engine, batch, text=text: print(text.upper()))
"""
    for _ in range(2):
        cell(source)
        assert cell("engine.reset(); engine.run([1]);").printed == "one\nONE\ntwo\nTWO\nthree\nTHREE\n"


def test_a_cell_that_attaches_ready_made_handlers_replaces_them_when_it_is_run_again(cell):
    cell("from pellucid.handlers import History, ProgressBar")
    source = "history = History().attach(engine); bars = [ProgressBar().attach(engine) for _ in range(2)]"
    for _ in range(3):
        cell(source)
    cell("engine.on(Events.ITERATION_COMPLETED)(lambda engine, batch: engine.record({'x': batch}))")
    shown = cell("engine.run([1, 2]); print(len(history), [type(one).__name__ for one in engine.attached()])")
    assert shown.printed.endswith("2 ['History', 'ProgressBar', 'ProgressBar']\n")


@pytest.mark.parametrize(
    ("shown", "texts"),
    [
        ("engine", ["Engine mine", "iteration", "<td"]),
        ("engine.state", ["state", "iteration", "best", "0.5"]),
        ("engine.run([1, 2])", ["snapshot", "iteration", "best", "0.5", "completed"]),
        ("engine.describe()", ["Engine mine", "EPOCH_COMPLETED", "hello&lt;&amp;&gt;"]),
    ],
)
def test_it_shows_itself_as_html_and_escapes_what_is_the_users(cell, shown, texts):
    cell("engine = Engine(lambda engine, batch: None, name='mine', state={'best': 0.5, 'note': '<script>'})")
    cell("def hello(engine, batch): ...\nhello.__qualname__ = 'hello<&>'\nengine.add_event_handler('STARTED', hello);")
    html = cell(shown).html
    assert [text for text in texts if text not in html] == []
    assert "<script>" not in html
