"""Which modules of a model are sharded as groups of their own, found and checked before anything is changed.

A group's weights are gathered for its forward and for its backward, and let go of afterwards: the largest group is what
a rank holds beside its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from ..errors import StrategyError
from .base import Model

__all__ = ["Choice", "Groups", "called_modules", "find_groups", "matching", "named_modules"]

Choice = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool] | str | Sequence[str] | None

_MOST_NAMES = 12


class Groups(NamedTuple):
    """The groups of a model, each after all groups within it, and the parameters of each with a name."""

    modules: list[nn.Module]
    parameters: dict[nn.Module, dict[str, nn.Parameter]]


def called_modules(model: Model) -> dict[str, nn.Module]:
    """Return by name the modules that have a forward to be called: a mere container stands for what it contains.

    Raises:
        StrategyError: a parameter is in a container, where no forward would gather it.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.items() if isinstance(model, Mapping) else [("", model)]:
        if _has_forward(module):
            found[name] = module
            continue
        own = next((key for key, _ in module.named_parameters(recurse=False)), None)
        if own is not None:
            raise StrategyError(
                f"{_path(name, own)!r} is a parameter of a {type(module).__name__}, which has no forward() that could "
                "gather its shards: give it one, and compute in it"
            )
        found |= called_modules({_path(name, key): child for key, child in module.named_children()})
    return found


def named_modules(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with its full name, those of a mapping below their key."""
    for prefix, root in model.items() if isinstance(model, Mapping) else [("", model)]:
        yield from root.named_modules(prefix=prefix)


def matching(model: Model, pattern: str, what: str) -> list[nn.Module]:
    """Return the modules whose name fits a pattern, in which ``*`` stands for one part of a name between dots.

    Raises:
        StrategyError: none does.
    """
    found = [module for name, module in named_modules(model) if _fits(name, pattern)]
    if not found:
        raise StrategyError(
            f"{what} has {pattern!r}, which is the name of no module: {_names(model)}. A name is written as in "
            "model.named_modules(), and * stands for any one part of it, as in 'layers.*'"
        )
    return found


def find_groups(model: Model, choice: Choice) -> Groups:
    """Return the groups that ``choice`` means; the called modules are always groups.

    Raises:
        StrategyError: it chooses nothing, or parameters cannot be sharded so.
    """
    roots = called_modules(model)
    _refuse_nested(roots)
    if choice is None:
        chosen = [block for root in roots.values() for block in _blocks(root)]
    else:
        chosen = [module for module in _chosen(model, choice) if next(module.parameters(), None) is not None]
        for module in chosen:
            if not _has_forward(module):
                raise StrategyError(
                    f"shard chooses a {type(module).__name__}, which has no forward: choose what is in it"
                )
    groups = {*chosen, *roots.values()}
    while True:
        owned = _owned(roots, groups)
        shared = {module for owners in owned.values() if len(owners) > 1 for module in owners}
        if not shared:
            break
        if choice is not None or not shared - set(roots.values()):
            raise _shared_error(owned)
        groups -= shared - set(roots.values())
    ordered = list(_inner_first(roots.values(), groups))
    by_group: dict[nn.Module, dict[str, nn.Parameter]] = {module: {} for module in ordered}
    for parameter, owners in owned.items():
        for module, name in owners.items():
            by_group[module][name] = parameter
    for parameters in by_group.values():
        _check(parameters)
    return Groups(ordered, by_group)


def _refuse_nested(roots: Mapping[str, nn.Module]) -> None:
    inside = {module: name for name, root in roots.items() for module in list(root.modules())[1:]}
    for name, root in roots.items():
        if root in inside:
            raise StrategyError(
                f"the module {name!r} is also a part of {inside[root]!r}, and only one of them can gather its shards: "
                f"give {inside[root]!r} alone"
            )


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost blocks that a list or a sequence is made of. A single layer is too little for a group."""
    is_series = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    for child in module.children():
        is_block = next(child.children(), None) is not None and next(child.parameters(), None) is not None
        if is_series and is_block and _has_forward(child):
            yield child
        else:
            yield from _blocks(child)


def _chosen(model: Model, choice: Choice) -> list[nn.Module]:
    if isinstance(choice, str):
        choice = (choice,)
    if isinstance(choice, type):
        choice = (choice,)
    if isinstance(choice, Sequence):
        if not choice:
            return []
        if all(isinstance(one, str) for one in choice):
            return [module for pattern in choice for module in matching(model, str(pattern), "shard")]
        if all(isinstance(one, type) for one in choice):
            found = [module for _, module in named_modules(model) if isinstance(module, tuple(choice))]  # type: ignore[arg-type]
            return found or _nothing(model, choice)
    elif callable(choice):
        return [module for name, module in named_modules(model) if choice(name, module)] or _nothing(model, choice)
    raise StrategyError(
        f"shard={choice!r}: a class of modules, several, a function (name, module) -> bool, or names were wanted"
    )


def _nothing(model: Model, choice: Choice) -> list[nn.Module]:
    raise StrategyError(f"shard={choice!r} chooses no module of the model: {_names(model)}")


def _owned(roots: Mapping[str, nn.Module], groups: set[nn.Module]) -> dict[nn.Parameter, dict[nn.Module, str]]:
    """Return of each parameter the groups that it is in, and its name there."""
    owned: dict[nn.Parameter, dict[nn.Module, str]] = {}
    seen: set[tuple[nn.Module, nn.Module]] = set()

    def walk(module: nn.Module, name: str, owner: nn.Module) -> None:
        owner = module if module in groups else owner
        if (module, owner) in seen:
            return
        seen.add((module, owner))
        for key, parameter in module.named_parameters(recurse=False):
            owned.setdefault(parameter, {}).setdefault(owner, _path(name, key))
        for key, child in module.named_children():
            walk(child, _path(name, key), owner)

    for name, root in roots.items():
        walk(root, name, root)
    return owned


def _inner_first(modules: Iterable[nn.Module], groups: set[nn.Module]) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            yield from walk(child)
        if module in groups:
            yield module

    for module in modules:
        yield from walk(module)


def _check(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse what ``fully_shard`` cannot take, or would only complain of amid the first forward."""
    types: dict[object, str] = {}
    for name, parameter in parameters.items():
        if not parameter.ndim:
            raise StrategyError(f"{name!r} is a number of shape (), which cannot be sharded: give it the shape (1,)")
        if not parameter.is_contiguous():
            raise StrategyError(
                f"{name!r} is not contiguous in memory (channels_last, or a transpose), and cannot be sharded: call "
                "model.to(memory_format=torch.contiguous_format) before the engine is made"
            )
        if parameter.requires_grad:
            types.setdefault(parameter.dtype, name)
    if len(types) > 1:
        named = ", ".join(f"{name!r} of {dtype}" for dtype, name in types.items())
        raise StrategyError(
            f"a group holds parameters of different types: {named}. Cast the model to one type, or choose groups of "
            "one type each with shard="
        )


def _shared_error(owned: Mapping[nn.Parameter, Mapping[nn.Module, str]]) -> StrategyError:
    one, other, *_ = next(owners.values() for owners in owned.values() if len(owners) > 1)
    return StrategyError(
        f"{one!r} and {other!r} are one parameter in two groups, each of which would shard it: choose a module that "
        "holds both as a group, or none that holds only one; of a mapping, give the parts as one module with a forward"
    )


def _fits(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _names(model: Model) -> str:
    names = [name for name, module in named_modules(model) if name and next(module.parameters(), None) is not None]
    more = f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"those with parameters are {', '.join(map(repr, names[:_MOST_NAMES]))}{more}"


def _path(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
