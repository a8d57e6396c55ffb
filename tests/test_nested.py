"""Batches and outputs of every shape: moved, detached and mapped, and left alone wherever nothing is to be done."""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from pellucid.engine.nested import detach, map_nested, move

CPU, META = torch.device("cpu"), torch.device("meta")

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Item:
    x: Any
    label: str = "cat"
    cached: Any = field(init=False, repr=False)


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any = None


class Named(dict):  # type: ignore[type-arg]
    """A dict that carries more than its items."""

    def __init__(self, owner: str, **items: Any) -> None:
        super().__init__(**items)
        self.owner = owner


class Labelled(list):  # type: ignore[type-arg]
    label = ""


class Unbuildable(Mapping):  # type: ignore[type-arg]
    """A mapping that cannot be made out of its items."""

    def __init__(self, x: Any, source: str) -> None:
        self.items_ = {"x": x, "source": source}

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class Encoding(UserDict):  # type: ignore[type-arg]
    """Moves itself, in place, as tokenizers' results do; answers to any attribute."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: torch.device) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Graph:
    """Moves itself, in place, and returns nothing."""

    def __init__(self) -> None:
        self.x = torch.zeros(2)

    def to(self, device: torch.device) -> None:
        self.x = self.x.to(device)


def containers(x: Any) -> dict[str, Any]:
    item = Item(x)
    item.cached = x
    counted: defaultdict[str, Any] = defaultdict(list, x=x)
    labelled = Labelled([x, 1])
    labelled.label = "kept"
    return {
        "tensor": x,
        "dict": {"x": x, "n": 1},
        "ordered": OrderedDict(b=x, a=x),
        "default": counted,
        "user dict": UserDict(x=x),
        "dict subclass": Named("me", x=x),
        "read-only mapping": MappingProxyType({"x": x}),
        "list": [x, "text", None],
        "list subclass": labelled,
        "tuple": (x, 2.5),
        "named tuple": Pair(x, 1),
        "dataclass": item,
        "frozen dataclass": Frozen(x),
        "slotted dataclass": Slotted(x, 1),
        "nested": {"a": [(x, Pair(x, Frozen((x,))))]},
    }


def tensors_of(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_nested(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


NAMES = list(containers(0))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_that_is_there_already_is_the_same_object(name: str) -> None:
    batch = containers(torch.zeros(2))[name]
    assert move(batch, CPU) is batch
    assert detach(batch) is batch
    assert map_nested(batch, lambda tensor: tensor) is batch


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_moved_and_every_type_kept(name: str) -> None:
    x = torch.zeros(2)
    batch = containers(x)[name]
    moved = move(batch, META)
    assert type(moved) is type(batch)
    assert tensors_of(moved) and all(tensor.device == META for tensor in tensors_of(moved))
    assert len(tensors_of(batch)) == len(tensors_of(moved))
    assert all(tensor is x for tensor in tensors_of(batch)), "the user's own batch must not change"


@pytest.mark.parametrize("name", NAMES)
def test_every_graph_is_cut_and_every_type_kept(name: str) -> None:
    output = containers(torch.zeros(2, requires_grad=True) * 2)[name]
    detached = detach(output)
    assert type(detached) is type(output)
    assert tensors_of(detached) and not any(tensor.requires_grad for tensor in tensors_of(detached))
    assert all(tensor.requires_grad for tensor in tensors_of(output))


def test_what_a_container_carries_beside_its_tensors_is_kept() -> None:
    moved = {name: move(value, META) for name, value in containers(torch.zeros(2)).items()}
    assert moved["default"]["new key"] == []
    assert moved["dict subclass"].owner == "me"
    assert moved["list subclass"].label == "kept"
    assert list(moved["ordered"]) == ["b", "a"]
    assert moved["dataclass"].label == "cat" and moved["dataclass"].cached.device == META
    assert moved["tuple"][1] == 2.5 and moved["named tuple"].y == 1


def test_parts_that_did_not_change_are_the_same_objects() -> None:
    targets = {"boxes": [torch.zeros(4)]}
    loss = torch.zeros((), requires_grad=True)
    detached = detach({"loss": loss, "targets": targets})
    assert detached["targets"] is targets
    assert detached["loss"] is not loss


@pytest.mark.parametrize(
    "value", [None, 3, 2.5, True, "text", b"bytes", {1, 2}, range(3), torch.float32, object(), Item]
)
def test_what_holds_no_tensors_is_left_alone(value: Any) -> None:
    assert move(value, META) is value
    assert detach(value) is value
    assert map_nested([value], lambda tensor: tensor)[0] is value


def test_subclasses_of_tensor_are_moved_and_detached_as_such() -> None:
    class Image(Tensor):
        pass

    image = torch.zeros(2).as_subclass(Image).requires_grad_()
    assert type(move([image], META)[0]) is Image
    detached = detach({"image": image, "weight": nn.Parameter(torch.zeros(1))})
    assert type(detached["image"]) is Image
    assert not any(tensor.requires_grad for tensor in detached.values())


def test_what_torch_returns_as_a_tuple_of_its_own_keeps_its_type() -> None:
    best = torch.zeros(2, 3, requires_grad=True).max(dim=1)
    detached = detach(best)
    assert type(detached) is type(best)
    assert not detached.values.requires_grad
    assert detached.indices is best.indices


def test_a_packed_sequence_is_moved_by_its_own_method() -> None:
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    assert move(packed, CPU) is packed
    moved = move((packed, 1), META, non_blocking=True)[0]
    assert isinstance(moved, PackedSequence)
    assert moved.data.device == META
    assert moved.batch_sizes.device == CPU, "torch wants these on the CPU, always"


@pytest.mark.parametrize("make", [lambda: Encoding(x=torch.zeros(2)), Graph])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_an_object_that_can_move_itself_does_so(make: Callable[[], Any], non_blocking: bool) -> None:
    batch = make()
    assert move([batch], CPU, non_blocking)[0] is batch
    assert move(batch, META, non_blocking) is batch
    assert batch.x.device == META


def test_a_field_called_to_is_not_taken_for_a_method() -> None:
    Edge = namedtuple("Edge", ["source", "to"])
    assert move(Edge(torch.zeros(1), 2), META).source.device == META


def test_modules_are_left_alone_even_if_they_are_dataclasses() -> None:
    @dataclass(eq=False)
    class Net(nn.Module):
        weight: nn.Parameter

        def __new__(cls, *args: Any) -> Net:
            net = super().__new__(cls)
            nn.Module.__init__(net)
            return net

    net = Net(nn.Parameter(torch.zeros(1)))
    assert move({"net": net}, META)["net"] is net
    assert detach((net, net.weight))[0] is net
    assert net.weight.device == CPU and net.weight.requires_grad


@pytest.mark.parametrize("container", [[], {}])
def test_a_container_that_contains_itself_is_named(container: Any) -> None:
    x = torch.zeros(1, requires_grad=True)
    container.update(x=x, me=[container]) if isinstance(container, dict) else container.extend([x, [container]])
    with pytest.raises(ValueError, match="does it contain itself"):
        move(container, META)
    with pytest.raises(ValueError, match="does it contain itself"):
        map_nested(container, torch.clone)
    assert detach(container) is container


def test_a_mapping_that_cannot_be_rebuilt_is_named_by_move_and_left_alone_by_detach() -> None:
    odd = Unbuildable(torch.zeros(1, requires_grad=True), "disk")
    assert move(odd, CPU) is odd
    with pytest.raises(TypeError, match=r"Unbuildable cannot be rebuilt .* give the class a method \.to\(device\)"):
        move(odd, META)
    loss = torch.zeros((), requires_grad=True)
    detached = detach({"odd": odd, "loss": loss})
    assert detached["odd"] is odd
    assert not detached["loss"].requires_grad


def test_a_class_whose_copy_is_itself_is_not_written_to() -> None:
    class Shared(dict):  # type: ignore[type-arg]
        def __copy__(self) -> Shared:
            return self

    shared = Shared(x=torch.zeros(1))
    with pytest.raises(TypeError, match="the same object"):
        move(shared, META)
    assert shared["x"].device == CPU


def test_objects_that_answer_to_everything_are_not_asked() -> None:
    class Eager:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"asked for {name}")

        @property
        def __class__(self) -> type:
            raise RuntimeError("asked for the class")

    eager = Eager()
    assert detach([eager])[0] is eager
    assert move([eager], META)[0] is eager


def test_map_nested_takes_other_leaves() -> None:
    assert map_nested({"a": [1, 2.0], "b": "x"}, lambda n: n + 1, leaf=(int, float)) == {"a": [2, 3.0], "b": "x"}
    assert map_nested(({"a": 1}, [2]), sorted, leaf=dict) == (["a"], [2])


def test_mapping_makes_no_reference_cycle() -> None:
    gc.collect()
    gc.disable()
    try:
        for value in containers(torch.zeros(2, requires_grad=True)).values():
            move(value, META)
            detach(value)
            map_nested(value, torch.clone)
        del value
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_dataclass_with_a_field_not_yet_set_is_moved() -> None:
    item = Item(torch.zeros(1))
    moved = move(item, META)
    assert moved.x.device == META
    assert not hasattr(moved, "cached")
    assert copy.copy(moved).label == "cat"
