"""Packages that only some handlers need."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["import_optional"]


def import_optional(module: str, *, user: str, extra: str) -> Any:
    """Return a module of an optional package.

    Raises:
        ImportError: it is not installed; the message names the command that does.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{user} needs {extra}, which is not installed: pip install 'pellucid[{extra}]'") from error
