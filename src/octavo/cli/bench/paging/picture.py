"""The figures of `octavo bench paging` as one SVG: a row for each set of lengths, with three panels of bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.cli.bench.svg import COLOURS, even_ticks, page, scale, text

WIDTH = 960
LEFT, PANEL_WIDTH, PANEL_STEP = 56, 248, 314  # of the first panel, and to the next
TOP, PANEL_HEIGHT, ROW_STEP = 104, 200, 304
BLUE, RED, GREEN, YELLOW, VIOLET, GREY = COLOURS
SHARES = {
    "tokens": ("token states", BLUE),
    "reserved": ("reservation", GREEN),
    "internal": ("internal", YELLOW),
    "external": ("external fragmentation", RED),
}
KINDS = {"parallel": ("parallel samples", GREY), "beam": ("beams", VIOLET)}
Part = tuple[float, str]  # height, colour


def draw(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """`figures`: what `measure` gives, by the names of the lengths."""
    lines = []
    x = float(LEFT)
    for label, colour in (*SHARES.values(), *KINDS.values()):
        lines.append(f'<rect x="{x:.1f}" y="13" width="12" height="12" fill="{colour}"/>')
        lines.append(text(x + 18, 23, label))
        x += 40 + 7 * len(label)
    for i, (name, each) in enumerate(figures.items()):
        lines += _row(name, each, TOP + i * ROW_STEP)
    return page(WIDTH, TOP + ROW_STEP * len(figures) - (ROW_STEP - PANEL_HEIGHT) + 40, lines)


def _row(name: str, figures: Mapping[str, Any], top: float) -> list[str]:
    memory, sharing = figures["memory"], figures["sharing"]
    shares = {
        system: [[(100 * each[share], colour) for share, (_, colour) in SHARES.items()]]
        for system, each in memory.items()
    }
    running = {system: [[(each["mean_running"], BLUE)]] for system, each in memory.items()}
    widths = next(iter(sharing.values()))
    saved = {n: [[(100 * sharing[kind][n]["saved"], colour)] for kind, (_, colour) in KINDS.items()] for n in widths}
    words = f"{name}: {figures['mean_input']:.0f} tokens in, {figures['mean_output']:.0f} out"
    bottom = top + PANEL_HEIGHT
    return [
        text(LEFT, top - 40, words, weight="600"),
        *_panel("% of the KV memory", shares, [0, 20, 40, 60, 80, 100], LEFT, bottom),
        *_panel("requests at once", running, _ticks(running), LEFT + PANEL_STEP, bottom),
        *_panel("% of blocks saved by sharing, by width", saved, _ticks(saved), LEFT + 2 * PANEL_STEP, bottom),
    ]


def _ticks(groups: Mapping[str, Sequence[Sequence[Part]]]) -> list[float]:
    """With room for a figure above the highest bar."""
    return even_ticks(1.1 * max(height for bars in groups.values() for bar in bars for height, _ in bar))


def _panel(
    title: str, groups: Mapping[str, Sequence[Sequence[Part]]], ticks: Sequence[float], left: float, bottom: float
) -> list[str]:
    """Bars, side by side in each group; the parts of a bar stand on each other, the first below. Above a bar of one
    part stands its height."""
    lines = [text(left, bottom - PANEL_HEIGHT - 14, title)]
    lines += scale(left, bottom, PANEL_WIDTH, PANEL_HEIGHT, ticks)
    group_width = PANEL_WIDTH / len(groups)
    for i, (label, bars) in enumerate(groups.items()):
        bar_width = 0.7 * group_width / len(bars)
        middle = left + (i + 0.5) * group_width
        lines.append(text(middle, bottom + 18, label, anchor="middle"))
        for j, parts in enumerate(bars):
            x, y = middle + (j - len(bars) / 2) * bar_width, bottom
            for value, colour in parts:
                height = PANEL_HEIGHT * value / ticks[-1]
                y -= height
                lines.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar_width:.1f}" height="{height:.1f}" fill="{colour}"/>'
                )
            if len(parts) == 1:
                lines.append(text(x + bar_width / 2, y - 4, f"{parts[0][0]:.1f}", anchor="middle"))
    return lines
