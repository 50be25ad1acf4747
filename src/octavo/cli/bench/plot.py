"""`octavo bench plot`: two pictures in one SVG from files of `octavo bench step`: cost by context, rate by users."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.cli.bench.report import read_json
from octavo.cli.bench.svg import COLOURS, check_name, even_ticks, page, scale, text
from octavo.cli.parser import Parser, output_file
from octavo.errors import ConfigError

WIDTH, HEIGHT = 960, 392
LEFT, TOP, PANEL_WIDTH, PANEL_HEIGHT, PANEL_STEP = 64, 72, 376, 256, 480  # of the first panel, and to the next
POINT = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Panel:
    """`place` puts a value of x on a scale on which `ticks` are even."""

    title: str
    x_label: str
    ticks: Sequence[float]
    place: Callable[[float], float]
    series: dict[str, list[POINT]]


def run(argv: list[str]) -> int:
    parser = Parser("octavo bench plot", "Draw what `octavo bench step` measured.", "FILE... --out FILE.svg")
    about = "JSON of `octavo bench step`; files of one model and setting make one line"
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=about)
    parser.add_argument("--out", type=output_file, required=True, metavar="FILE", help="the picture, .svg")
    args = parser.parse_args(argv)
    check_name("--out", args.out)
    found: dict[str, dict[tuple[int, int], dict[str, Any]]] = {}  # one point for each size: the last file's
    for path in args.files:
        label, measured = read(path)
        found.setdefault(label, {}).update({(each["num_requests"], each["context_len"]): each for each in measured})
    points = {label: list(group.values()) for label, group in found.items()}
    args.out.write_text(draw([by_context(points), by_users(points)]))
    return 0


def read(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """The name of what was measured, and its points."""
    record = read_json(path)
    try:
        points: list[dict[str, Any]] = record["points"]
        engine = record["engine"]
    except (KeyError, TypeError):
        raise ConfigError(f"{path} is no result of `octavo bench step`") from None
    settings = (engine.get(name) for name in ("dtype", "quantization", "activation_dtype", "kv_cache_dtype"))
    return " ".join([Path(engine["model"]).name, *(s for s in settings if s not in (None, "auto"))]), points


def by_context(points: dict[str, list[dict[str, Any]]]) -> Panel:
    """Milliseconds for a token, of the fewest requests measured."""
    fewest = min(point["num_requests"] for group in points.values() for point in group)
    series = {
        label: sorted(
            (point["context_len"], 1e3 * point["step_and_output"]) for point in group if point["num_requests"] == fewest
        )
        for label, group in points.items()
    }
    ticks = even_ticks(max(x for line in series.values() for x, _ in line))
    users = "one user" if fewest == 1 else f"{fewest} users"
    return Panel(f"ms per token, {users}", "tokens of context", ticks, lambda x: x / ticks[-1], series)


def by_users(points: dict[str, list[dict[str, Any]]]) -> Panel:
    """Tokens per second of all requests together, at the shortest context measured; doublings are even."""
    context_len = min(point["context_len"] for group in points.values() for point in group)
    series = {
        label: sorted(
            (point["num_requests"], point["num_requests"] / point["step_and_output"])
            for point in group
            if point["context_len"] == context_len
        )
        for label, group in points.items()
    }
    doublings = max(1, math.ceil(math.log2(max(x for line in series.values() for x, _ in line))))
    title = f"tokens/s while all decode, context {context_len:,}"
    ticks = [2.0**i for i in range(doublings + 1)]
    return Panel(title, "users", ticks, lambda x: math.log2(x) / doublings, series)


def draw(panels: Sequence[Panel]) -> str:
    labels = list(panels[0].series)
    lines = []
    x = LEFT
    for label in labels:
        colour = _colour(labels, label)
        lines.append(f'<line x1="{x}" y1="18" x2="{x + 20}" y2="18" stroke="{colour}" stroke-width="2.5"/>')
        lines.append(text(x + 26, 22, label))
        x += 50 + 7 * len(label)
    for i, panel in enumerate(panels):
        lines += _panel(panel, LEFT + i * PANEL_STEP, labels)
    return page(WIDTH, HEIGHT, lines)


def _panel(panel: Panel, left: float, labels: list[str]) -> list[str]:
    bottom = TOP + PANEL_HEIGHT
    heights = even_ticks(max(y for line in panel.series.values() for _, y in line))
    lines = [text(left, TOP - 16, panel.title, weight="600")]
    lines += scale(left, bottom, PANEL_WIDTH, PANEL_HEIGHT, heights)
    for x in panel.ticks:
        at = left + PANEL_WIDTH * panel.place(x)
        lines.append(f'<line x1="{at:.1f}" y1="{bottom}" x2="{at:.1f}" y2="{bottom + 5}" stroke="#8c959f"/>')
        lines.append(text(at, bottom + 20, f"{x:,.6g}", anchor="middle"))
    lines.append(text(left + PANEL_WIDTH / 2, bottom + 42, panel.x_label, anchor="middle"))
    for label, line in panel.series.items():
        colour = _colour(labels, label)
        places = [(left + PANEL_WIDTH * panel.place(x), bottom - PANEL_HEIGHT * y / heights[-1]) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    return lines


def _colour(labels: list[str], label: str) -> str:
    return COLOURS[labels.index(label) % len(COLOURS)]
