"""How engines and states show themselves in a notebook: one small table, in light and dark themes."""

from __future__ import annotations

import html
from collections.abc import Iterable

__all__ = ["table"]


def table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return an HTML table with a title and two columns; colours are the notebook's own."""
    cell = "text-align:left;padding:1px 12px 1px 0;font-family:monospace;vertical-align:top"
    body = "".join(
        f'<tr style="background:none"><td style="{cell};opacity:.7">{html.escape(name)}</td>'
        f'<td style="{cell};white-space:pre-wrap">{html.escape(value)}</td></tr>'
        for name, value in rows
    )
    return f'<div><b>{html.escape(title)}</b><table style="border:none;margin:2px 0">{body}</table></div>'
