"""The package as a whole: what importing it does, and what it exports."""

from __future__ import annotations

import configparser
import inspect
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import pellucid.engine
import pellucid.handlers

ROOT = Path(__file__).parent.parent
PACKAGES = [pellucid.engine, pellucid.handlers]

# What the engine may load beyond torch and what Ignite loads: modules of Python's own that cost next to nothing.
CHEAP = {"difflib", "faulthandler", "html", "html.entities", "html.parser", "_markupbase"}


def run_python(script: str) -> dict:
    """What ``script`` prints as JSON, run in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- importing does nothing


def test_importing_the_engine_loads_nothing_beyond_torch_and_what_ignite_loads():
    new = run_python("""
import json, sys
import torch, ignite.engine
before = set(sys.modules)
import pellucid.engine
print(json.dumps(sorted(set(sys.modules) - before)))
""")
    assert {name for name in new if name.split(".")[0] != "pellucid"} <= CHEAP


def test_importing_the_handlers_loads_no_optional_package():
    new = run_python("""
import json, sys
import torch, ignite.engine, pellucid.engine, tqdm
before = set(sys.modules)
import pellucid.handlers
print(json.dumps(sorted(set(sys.modules) - before)))
""")
    foreign = {name.split(".")[0] for name in new} - {"pellucid", "tqdm"}
    assert foreign <= set(sys.stdlib_module_names)


def test_importing_changes_no_global_state():
    changed = run_python("""
import atexit, json, logging, os, random, signal, sys, threading, warnings
import numpy, torch, ignite.engine

def watched():
    yield "warning filters", list(warnings.filters)
    yield "random state of Python", random.getstate()
    yield "random state of NumPy", repr(numpy.random.get_state())
    yield "random state of torch", torch.get_rng_state().tolist()
    yield "default dtype", torch.get_default_dtype()
    yield "default device", torch.get_default_device()
    yield "grad mode", (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    yield "autocast", (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    yield "autocast cache", torch.is_autocast_cache_enabled()
    yield "threads of torch", (torch.get_num_threads(), torch.get_num_interop_threads())
    yield "deterministic algorithms", (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic)
    yield "matmul precision", torch.get_float32_matmul_precision()
    yield "process group", torch.distributed.is_initialized()
    yield "sharing strategy", torch.multiprocessing.get_sharing_strategy()
    yield "start method", torch.multiprocessing.get_start_method(allow_none=True)
    yield "signal handlers", {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield "logging", (logging.root.level, list(logging.root.handlers), logging.root.manager.disable)
    yield "exit hooks", atexit._ncallbacks()
    yield "hooks of Python", (sys.excepthook, sys.displayhook, threading.excepthook, sys.gettrace(), sys.getprofile())
    yield "threads", threading.active_count()
    yield "environment", dict(os.environ)
    yield "path", list(sys.path)
    hooks = (torch.nn.modules.module, sys.modules["torch.optim.optimizer"])
    for owner in (torch.nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader, ignite.engine.Engine,
                  torch, *hooks, ignite.engine, ignite.engine.engine, ignite.engine.events):
        names = {name: (id(value), len(value) if isinstance(value, (dict, list, set)) else 0)
                 for name, value in vars(owner).items()}
        yield f"{owner.__name__}, patched", names

warnings.simplefilter("error")
before = dict(watched())
import pellucid.engine, pellucid.handlers
after = dict(watched())
print(json.dumps([name for name in before if before[name] != after[name]]))
""")
    assert changed == []


def test_the_folders_are_not_imported_under_their_own_names():
    assert not {"engine", "handlers"} & sys.modules.keys()


# ---- what it exports


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_all_is_what_is_really_there(package):
    there = {name for name, value in vars(package).items() if not name.startswith("_") and not is_incidental(value)}
    assert sorted(package.__all__) == sorted(there)


def is_incidental(value: object) -> bool:
    return isinstance(value, types.ModuleType) or type(value).__module__ == "__future__"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_says_what_it_is(package):
    bare = [name for name in package.__all__ if not own_docstring(getattr(package, name))]
    bare += [f"{cls.__name__}.{name}" for cls in public_classes(package) for name in undocumented_members(cls)]
    assert bare == []


def public_classes(package: types.ModuleType) -> Iterator[type]:
    yield from (value for name in package.__all__ if inspect.isclass(value := getattr(package, name)))


def own_docstring(value: object) -> str | None:
    return vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)


def undocumented_members(cls: type) -> Iterator[str]:
    """Public methods and properties without a docstring, unless they carry on what a base class describes."""
    for name, member in vars(cls).items():
        is_code = inspect.isroutine(member) or isinstance(member, (property, classmethod, staticmethod))
        if is_code and not name.startswith("_") and not inspect.getdoc(getattr(cls, name)):
            yield name


def test_the_installed_version_is_the_one_in_setup_cfg():
    assert version("pellucid") == setup_cfg()["metadata"]["version"]


def test_every_package_is_listed_in_setup_cfg():
    folders = {path.parent for base in ("engine", "handlers") for path in (ROOT / base).rglob("__init__.py")}
    names = {"pellucid." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(setup_cfg()["options"]["packages"].split()) == names


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config
