"""`octavo top`: what a running server does, in the terminal: the figures of its page.

Owns how a record of GET /live looks in characters. The functions that draw are pure: a record in, text out.
"""

from __future__ import annotations

import colorsys
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from octavo.cli.client import Client
from octavo.cli.parser import Parser
from octavo.cli.sources import DEFAULT_URL
from octavo.config import api_key_of_environment

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

MAP_ROWS = 8  # of blocks
MAX_LISTED = 12  # requests
NUM_SPEEDS = 240  # remembered: two minutes
FREE, CACHED = 0, -1  # owners of blocks, as in GET /live
BARS = "▁▂▃▄▅▆▇█"

Record = dict[str, Any]


def run(argv: list[str]) -> int:
    parser = Parser("octavo top", "Watch what a running server does. Ctrl-C ends.", "[options]")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (default: $OCTAVO_API_KEY, $VLLM_API_KEY)")
    parser.add_argument("--once", action="store_true", help="print the figures once; so it is where no terminal is")
    args = parser.parse_args(argv)
    client = Client(args.url, args.api_key or api_key_of_environment())
    try:
        with closing(client.watch("/live")) as records:
            _show(records, client.url, once=args.once or not sys.stdout.isatty())
    except KeyboardInterrupt:
        pass
    return 0


def _show(records: Iterator[Record], url: str, *, once: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if once:
        console.print(draw(next(records), [], url, console.width))
        return
    speeds: deque[float] = deque(maxlen=NUM_SPEEDS)
    with Live(console=console, auto_refresh=False, screen=True) as screen:
        for record in records:
            speeds.append(record["tokens_per_second"])
            screen.update(draw(record, speeds, url, console.width), refresh=True)


def draw(record: Record, speeds: Iterable[float], url: str, width: int) -> Group:
    """The whole picture, `width` characters wide."""
    from rich.console import Group
    from rich.text import Text

    blocks = record["blocks"]
    state = " · the engine is dead" if not record["alive"] else " · the engine is restarted" * record["restarting"]
    speed = f"{record['tokens_per_second']:8.1f}"
    size = f"{blocks['num_blocks']} blocks of {blocks['block_size']} tokens, {blocks['usage']:.0%} in use"
    return Group(
        Text(f"octavo top · {record['model']} at {url}{state}", style="bold"),
        Text(),
        Text.assemble((speed, "bold"), " tokens/s  ", (spark(speeds, width - 20), "cyan")),
        *(Text(f"  {line}") for line in figures(record)),
        Text(),
        Text(f"  {size}", style="dim"),
        block_map(blocks["runs"], blocks["num_blocks"], width - 4),
        Text(),
        request_table(record["requests"]),
    )


def figures(record: Record) -> list[str]:
    requests, first, hits = record["requests"], record["first_token_seconds"], record["prefix_cache_hit_rate"]
    parts = [
        f"first token {'–' if first is None else f'{first * 1000:.0f} ms'}",
        f"cache hits {'–' if hits is None else f'{hits:.0%}'}",
        f"preempted {record['num_preemptions']}",
        f"swapped {record['num_swaps']}",
        f"restarts {record['num_restarts']}",
    ]
    phases = f"{requests['num_decode']} decode, {requests['num_prefill']} prefill, {requests['num_waiting']} waiting"
    return [phases, " · ".join(parts)]


def spark(speeds: Iterable[float], width: int) -> str:
    """The last `width` of them as bars; the highest bar is the fastest."""
    shown = list(speeds)[-max(1, width) :]
    top = max(shown, default=0.0)
    return "".join(BARS[round((len(BARS) - 1) * speed / top)] if top else BARS[0] for speed in shown)


def cells(runs: Sequence[int], num_blocks: int, num_cells: int) -> list[tuple[int, bool]]:
    """Whose most blocks of each cell are, and whether any of those is shared. A cell is one block, or the next few
    where there are more blocks than cells; free ones count only where there is nothing else."""
    blocks = [(owner, refs) for length, owner, refs in zip(*[iter(runs)] * 3, strict=True) for _ in range(length)]
    per_cell = -(-num_blocks // num_cells)
    drawn = []
    for start in range(0, num_blocks, per_cell):
        inside = blocks[start : start + per_cell]
        counts = Counter(owner for owner, _ in inside if owner != FREE)
        owner = counts.most_common(1)[0][0] if counts else FREE
        drawn.append((owner, any(refs > 1 for each, refs in inside if each == owner)))
    return drawn


def block_map(runs: Sequence[int], num_blocks: int, width: int) -> Text:
    from rich.text import Text

    text = Text()
    for index, (owner, shared) in enumerate(cells(runs, num_blocks, width * MAP_ROWS)):
        if index % width == 0:
            text.append("\n  " if index else "  ")
        if owner in (FREE, CACHED):
            text.append("·" if owner == FREE else "▪", style="dim")
        else:
            text.append("◆" if shared else "■", style=colour(owner))
    text.append("\n  · free  ▪ cached  ■ in use  ◆ shared", style="dim")
    return text


def request_table(requests: Record) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=True, header_style="dim")
    table.add_column("request")
    table.add_column("phase")
    for name in ("prompt", "computed", "output", "preempted"):
        table.add_column(name, justify="right")
    for each in requests["shown"][:MAX_LISTED]:
        number = each["number"]
        table.add_row(
            Text(f"■ {number}", style=colour(number)) if number else Text("–"),
            each["phase"],
            str(each["num_prompt_tokens"]),
            str(each["num_computed_tokens"]),
            str(each["num_output_tokens"]),
            str(each["num_preemptions"]),
        )
    rest = requests["num_waiting"] + requests["num_prefill"] + requests["num_decode"] - table.row_count
    if rest > 0:
        table.add_row("", f"and {rest} more")
    return table


def colour(number: int) -> str:
    """A request's own: neighbours differ most."""
    red, green, blue = colorsys.hls_to_rgb((0.55 + number * 0.381966) % 1.0, 0.6, 0.55)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
