"""Which part may know what, read from the source: an import inside a function counts too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import pellucid.engine

ROOT = Path(__file__).parent.parent


class Import(NamedTuple):
    module: str  # absolute: pellucid.engine.errors
    name: str | None  # what `from module import name` takes out of it


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def dotted_package(path: Path) -> list[str]:
    return ["pellucid", *path.parent.relative_to(ROOT).parts]


def imports(tree: ast.AST, package: list[str]) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(module, alias.name) for alias in node.names)


def our_imports(path: Path) -> set[str]:
    """The modules of ours that a file imports, by absolute name; ``from . import x`` counts as x."""
    found = set()
    for module, name in imports(ast.parse(path.read_text()), dotted_package(path)):
        if module in {"pellucid", "pellucid.engine", "pellucid.engine.strategies", "pellucid.handlers"} and name:
            found.add(f"{module}.{name}")
        elif module.split(".")[0] == "pellucid":
            found.add(module)
    return found


PARALLEL = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "fully_shard", "GradScaler"}
HIDDEN_IN_A_STRING = re.compile(r"torch\.(distributed|nn\.parallel|amp|cuda\.amp)(\.\w+)*")


def device_knowledge(tree: ast.AST) -> set[str]:
    """The names in a source that only the device-strategy layer may name."""
    found = set()
    ours = {name for module, name in imports(tree, ["pellucid", "engine"]) if module == "pellucid.engine.strategies"}
    for module, name in imports(tree, ["pellucid", "engine"]):
        for dotted in (module, f"{module}.{name}"):
            if dotted == "torch.distributed" or dotted.startswith("torch.distributed."):
                found.add("torch.distributed")
        if name and name not in ours and (name in PARALLEL or ("autocast" in name and module.split(".")[0] == "torch")):
            found.add(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found |= named_by_attribute(node)
        elif isinstance(node, ast.Name) and node.id in PARALLEL - ours:
            found.add(node.id)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and HIDDEN_IN_A_STRING.fullmatch(node.value)
        ) and node.value not in ours:
            found.add(node.value)
    return found


def named_by_attribute(node: ast.Attribute) -> set[str]:
    """What an attribute names: ``torch.autocast``, say. ``engine.autocast()`` and ``strategy.autocast()`` are ours."""
    if node.attr in PARALLEL:
        return {node.attr}
    owner = ast.unparse(node.value)
    if owner == "torch" and node.attr == "distributed":
        return {"torch.distributed"}
    if "autocast" in node.attr and owner.split(".")[0] in {"torch", "amp"}:
        return {f"{owner}.{node.attr}"}
    return set()


@pytest.mark.parametrize("path", sources("engine") + sources("handlers"), ids=lambda path: str(path.relative_to(ROOT)))
def test_devices_and_parallelism_are_known_to_the_strategies_only(path):
    if path.is_relative_to(ROOT / "engine" / "strategies"):
        return
    assert device_knowledge(ast.parse(path.read_text())) == set()


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "import torch.distributed.fsdp as fsdp",
        "from torch import distributed as dist",
        "from torch.distributed.fsdp import anything",
        "from torch.nn.parallel import DistributedDataParallel as DDP",
        "def f():\n    return torch.nn.DataParallel(model)",
        "torch.distributed.barrier()",
        "torch.autocast('cuda')",
        "torch.cuda.amp.autocast()",
        "from torch.amp import autocast",
        "torch.is_autocast_enabled()",
        "amp.GradScaler()",
        "importlib.import_module('torch.distributed')",
    ],
)
def test_knowledge_of_devices_is_noticed(source):
    assert device_knowledge(ast.parse(source))


@pytest.mark.parametrize("source", ["engine.autocast()", "self.strategy.autocast()", "def autocast(self): ..."])
def test_our_own_verbs_are_not_taken_for_it(source):
    assert not device_knowledge(ast.parse(source))


LEAVES = {f"pellucid.engine.{name}" for name in ("errors", "nested", "display")}


@pytest.mark.parametrize(
    ("name", "may_know"),
    [
        ("errors", set()),
        ("nested", set()),
        ("display", set()),
        ("events", LEAVES),
        ("records", LEAVES),
        ("table", LEAVES | {"pellucid.engine.events"}),
        ("state", LEAVES | {"pellucid.engine.records"}),
    ],
)
def test_the_foundations_know_nothing_of_the_rest(name, may_know):
    assert our_imports(ROOT / "engine" / f"{name}.py") <= may_know


@pytest.mark.parametrize("path", sources("engine/strategies"), ids=lambda path: path.name)
def test_the_strategies_do_not_know_the_engine(path):
    outside = {module for module in our_imports(path) if not module.startswith("pellucid.engine.strategies")}
    assert outside <= {"pellucid.engine.errors", "pellucid.engine.nested"}


@pytest.mark.parametrize("path", sources("engine"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_engine_does_not_know_the_handlers(path):
    assert not [module for module in our_imports(path) if not module.startswith("pellucid.engine.")]


@pytest.mark.parametrize("path", sources("handlers"), ids=lambda path: path.name)
def test_handlers_use_only_the_public_names_of_the_engine(path):
    tree = ast.parse(path.read_text())
    taken = [used for used in imports(tree, dotted_package(path)) if used.module.startswith("pellucid")]
    public = {Import("pellucid.engine", name) for name in pellucid.engine.__all__}
    assert [used for used in taken if used not in public and not used.module.startswith("pellucid.handlers")] == []
    assert private_attributes(tree) == set()


def private_attributes(tree: ast.AST) -> set[str]:
    """``engine._loop`` and the like: a private attribute of anything but oneself."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    private = [node for node in attributes if node.attr.startswith("_") and not is_public_after_all(node.attr)]
    return {ast.unparse(node) for node in private if ast.unparse(node.value) not in {"self", "cls"}}


def is_public_after_all(name: str) -> bool:
    return name.endswith("__") or name in {"_asdict", "_fields", "_replace"}  # a magic name, a named tuple's


@pytest.mark.parametrize("path", sources("engine") + sources("handlers"), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_imports_the_folders_under_their_own_names(path):
    used = imports(ast.parse(path.read_text()), dotted_package(path))
    assert not [module for module, _ in used if module.split(".")[0] in {"engine", "handlers"}]
