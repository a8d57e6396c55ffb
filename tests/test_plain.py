"""What is saved comes back as what it was; what a safe loader would not read is refused before it is written."""

from __future__ import annotations

import enum
import io
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from pellucid.engine import CheckpointError, Engine, Events, load_weights, resume, save_checkpoint
from pellucid.engine.plain import from_plain, to_plain


class Colour(enum.IntEnum):
    RED = 1


def there_and_back(value: Any, present: Any = None) -> Any:
    file = io.BytesIO()
    torch.save(to_plain("it", value), file)
    file.seek(0)
    return from_plain(torch.load(file, weights_only=True), present)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, numpy.ndarray):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert numpy.array_equal(one, other)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one.to_dense(), other.to_dense())
    elif isinstance(one, dict):
        assert list(one) == list(other) and [type(key) for key in one] == [type(key) for key in other]
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -(2**2038), 1.5, 2j, "text", b"bytes", torch.float16, torch.Size((2, 3)),
        (1, [2.0, {"a": (None,)}]), {1, "a", (2, 3)}, Counter("abca"), OrderedDict(b=1, a=2), {(1, "a"): {2.5: [b""]}},
        torch.arange(3), torch.tensor(1.5, dtype=torch.bfloat16), torch.eye(2).to_sparse(),
        numpy.float32(0.1), numpy.int64(3), numpy.bool_(True), numpy.complex64(1j), numpy.float16(2),
        numpy.zeros(()), numpy.arange(3, dtype=numpy.uint8), numpy.ones((2, 0)), numpy.arange(3, dtype=">f8"),
        numpy.arange(3, dtype=">i2")[::-1], {"a": [numpy.float64(1)]}, numpy.ones((2, 3), dtype=numpy.uint16),
    ],
)  # fmt: skip
def test_it_comes_back_as_what_it_was(value):
    assert_same(there_and_back(value), value)


def test_keys_of_numpys_are_found_as_before():
    counts = Counter(numpy.array([3, 3, 5]))
    names = {numpy.str_("a"): 1, (numpy.int8(1), "b"): 2, numpy.float32(0.5): 3}
    assert there_and_back(counts) == counts and there_and_back(counts)[numpy.int64(3)] == 2
    assert there_and_back(names) == names
    assert there_and_back({numpy.int64(1), 2}) == {1, 2}


def test_defaults_go_on_filling_up_at_any_depth():
    value = defaultdict(lambda: defaultdict(list), {"a": defaultdict(list, {1: [2]})})
    found = there_and_back(value, present=defaultdict(lambda: defaultdict(list)))
    found["a"][3].append(4)
    found["b"][5].append(6)
    assert found == {"a": {1: [2], 3: [4]}, "b": {5: [6]}}
    found = there_and_back({"inside": defaultdict(int, a=1)}, present={"inside": defaultdict(int)})
    found["inside"]["b"] += 1
    assert found == {"inside": {"a": 1, "b": 1}}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), "a value of type object"),
        ({Path("a"): 1}, r"it has the key .*Path\('a'\), and holds a value of type PosixPath"),
        ({Colour.RED: 1}, "holds a value of type Colour"),
        (Colour.RED, "holds a value of type Colour"),
        ({frozenset([1]): 1}, "type frozenset"),
        ({(1, Path("a")): 1}, "type PosixPath"),
        ({Path("a")}, "type PosixPath"),
        (numpy.longdouble(1), r"type longdouble \(float128\)"),
        (numpy.zeros(2, dtype=numpy.clongdouble), r"\(complex256\)"),
        (numpy.array(["a"]), r"type ndarray \(<U1\)"),
        (numpy.datetime64("2020-01-01"), "type datetime64"),
        (2**2040, "a value of 2041 bits"),
        ({2**2040: 1}, "a value of 2041 bits"),
        ([(1, {"a": {2**3000}})], "a value of 3001 bits"),
    ],
)
def test_what_a_safe_loader_would_not_read_is_refused(value, says):
    with pytest.raises(CheckpointError, match=says):
        to_plain("it", value)


class Remembers(nn.Module):
    """Keeps what is no tensor in its state dictionary."""

    def __init__(self, seen: Any = None) -> None:
        super().__init__()
        self.seen = seen

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Counts:
    """A handler that keeps NumPy's values."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"counts": numpy.zeros(2, dtype=numpy.int16), "mean": numpy.float32(0)}

    def count(self, engine: Engine, batch: Any) -> None:
        self.state = {"counts": self.state["counts"] + 1, "mean": self.state["mean"] + numpy.float32(0.1)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_numpys_values_of_models_handlers_and_optimizers_come_back(tmp_path):
    def make(seen: Any = None) -> tuple[Engine, Counts]:
        model = nn.Sequential(nn.Linear(1, 1), Remembers(seen))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["note"] = numpy.int8(5)
        engine = Engine(lambda engine, batch: None, model, optimizer=optimizer)
        counts = Counts()
        engine.add_event_handler(Events.ITERATION_COMPLETED, counts.count)
        return engine, counts

    seen = {"rows": numpy.arange(3, dtype=">f4"), "best": numpy.float64(2)}
    engine, counts = make(seen)
    engine.run([1, 2])
    path = save_checkpoint(engine, tmp_path).wait()
    again, counted = make()
    again.optimizer.param_groups[0]["note"] = None
    resume(again, tmp_path)
    assert_same(counted.state, counts.state)
    assert_same(again.model[1].seen, seen)
    assert_same(again.optimizer.param_groups[0]["note"], numpy.int8(5))
    loaded = nn.Sequential(nn.Linear(1, 1), Remembers())
    load_weights(loaded, path)
    assert_same(loaded[1].seen, seen)
