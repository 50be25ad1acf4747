"""The pieces that pictures of figures are drawn from: text, scales, the page. Knows nothing of what is measured.

Drawn by hand: pictures this simple need no library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from octavo.errors import ConfigError

COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")


def check_name(option: str, path: Path) -> None:
    if path.suffix != ".svg":
        raise ConfigError(f"{option} is {path}; its name must end in .svg")


def page(width: int, height: int, lines: Sequence[str]) -> str:
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#24292f">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    return "\n".join([*head, *lines, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "400") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'


def scale(left: float, bottom: float, width: float, height: float, ticks: Sequence[float]) -> list[str]:
    """Level lines for the values in `ticks`, which begin with 0, with the values beside them."""
    lines = []
    for y in ticks:
        at = bottom - height * y / ticks[-1]
        stroke = "#8c959f" if y == 0 else "#d8dee4"
        lines.append(f'<line x1="{left}" y1="{at:.1f}" x2="{left + width}" y2="{at:.1f}" stroke="{stroke}"/>')
        lines.append(text(left - 8, at + 4, f"{y:,.6g}", anchor="end"))
    return lines


def even_ticks(largest: float) -> list[float]:
    """From 0 to at least `largest` in two to five steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(largest / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if largest / (power * factor) <= 5)
    return [step * i for i in range(math.ceil(largest / step - 1e-9) + 1)]
