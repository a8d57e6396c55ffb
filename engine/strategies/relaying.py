"""Brings what ranks print to where this process prints, when that is no file of the system's: a notebook, say.

Ranks write to named pipes, one for each stream that stands in for one of the system's, and a thread here reads them. A
notebook's own way for the output of a copied process puts the words of several in between each other's.
"""

from __future__ import annotations

import codecs
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from multiprocessing.connection import wait
from pathlib import Path
from typing import TextIO

__all__ = ["leave_notebook", "relay_to", "relayed"]

_STREAMS = {"stdout": 1, "stderr": 2}
_MOST_BYTES = 65536


@contextmanager
def relayed(folder: Path) -> Iterator[None]:
    """Pass on what ranks print within the region, to the streams that this process has at its start."""
    streams = {name: getattr(sys, name) for name in _STREAMS if getattr(sys, name) is not getattr(sys, f"__{name}__")}
    if not streams or not hasattr(os, "mkfifo"):
        yield
        return
    with ExitStack() as open_files:
        pipes: dict[int, TextIO] = {}
        for name, stream in streams.items():
            os.mkfifo(folder / name)
            pipe = os.open(folder / name, os.O_RDWR | os.O_NONBLOCK)  # to write too: no end of file between two ranks
            open_files.callback(os.close, pipe)
            pipes[pipe] = stream
        ended, end = os.pipe()
        open_files.callback(os.close, ended)
        thread = threading.Thread(target=_pass_on, args=(pipes, ended), name="pellucid-relay", daemon=True)
        thread.start()
        try:
            yield
        finally:
            os.close(end)
            thread.join()


def relay_to(folder: Path) -> None:
    """Let this process, a rank, print into the pipes that it finds in the folder, whole lines at a time."""
    for name, number in _STREAMS.items():
        stream = getattr(sys, name)
        if (folder / name).exists():
            pipe = os.open(folder / name, os.O_WRONLY)
            os.dup2(pipe, number)  # what is not Python prints there too
            os.close(pipe)
            file = open(number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
            setattr(sys, name, file)
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def leave_notebook() -> None:
    """Let a copy of a notebook's process be no notebook: what it would display never arrives."""
    for module, name in (("IPython.core.interactiveshell", "InteractiveShell"), ("ipykernel.kernelbase", "Kernel")):
        singleton = getattr(sys.modules.get(module), name, None)
        if singleton is not None:
            singleton.clear_instance()


def _pass_on(pipes: dict[int, TextIO], ended: int) -> None:
    decoders = {pipe: codecs.getincrementaldecoder("utf-8")("replace") for pipe in pipes}
    while True:
        ready = wait([*pipes, ended])
        for pipe in ready:
            if pipe in pipes:
                pipes[pipe].write(decoders[pipe].decode(os.read(pipe, _MOST_BYTES)))
                pipes[pipe].flush()
        if ready == [ended]:
            return  # the ranks have ended, and nothing is left in the pipes
