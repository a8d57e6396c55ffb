"""Whether this is a notebook, and outputs of it that are shown again in the same place."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["NotebookOutput", "in_notebook"]


def in_notebook() -> bool:
    """Say whether a Jupyter kernel runs this. Imports nothing."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})


class NotebookOutput:
    """One output of the cell that runs: shown once, and replaced in its place after that."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, shown: Any) -> None:
        """Show something instead of what is shown."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display(shown, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(shown)
