"""`octavo top`: what a running server does, in the terminal: the figures of its page.

Owns how a record of GET /live looks in characters, and what is shown while there is none (feed.py waits for the
server). The functions that draw are pure: a record in, text out.
"""

from __future__ import annotations

import colorsys
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any

from octavo.cli.client import Client
from octavo.cli.feed import Feed, Keys
from octavo.cli.parser import Parser
from octavo.cli.sources import DEFAULT_URL
from octavo.config import api_key_of_environment
from octavo.errors import OctavoError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

MAP_ROWS, MIN_MAP_ROWS = 8, 2  # of blocks
MAX_LISTED = 12  # requests, where the terminal is high enough
NUM_OTHER_LINES = 11  # beside the map and the requests
NUM_SPEEDS = 240  # remembered: two minutes
NUM_RECORDS_ONCE = 3  # a second's
SILENT_SECONDS = 3.0  # records come twice a second
TIMEOUT_SECONDS = 15.0  # then another connection is tried
FREE, CACHED = 0, -1  # owners of blocks, as in GET /live
BARS = "▁▂▃▄▅▆▇█"

Record = dict[str, Any]


def run(argv: list[str]) -> int:
    parser = Parser("octavo top", "Watch what a running server does. q or Ctrl-C ends.", "[options]")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (default: $OCTAVO_API_KEY, $VLLM_API_KEY)")
    parser.add_argument("--once", action="store_true", help="print the figures once; so it is where no terminal is")
    args = parser.parse_args(argv)
    client = Client(args.url, args.api_key or api_key_of_environment(), timeout=TIMEOUT_SECONDS)
    if args.once or not sys.stdout.isatty():
        _show_once(client)
        return 0
    # The terminal is to be left as it was found, however this ends.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with closing(Feed(client, "/live")) as feed:
            _show(feed, client.url)
    except KeyboardInterrupt:
        pass
    return 0


def _show_once(client: Client) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    with closing(client.watch("/live")) as records:
        for record in islice(records, NUM_RECORDS_ONCE):  # the first one knows no speed yet
            last = record
        console.print(draw(last, [], client.url, console.width))


def _show(feed: Feed, url: str) -> None:
    """Until q is pressed. Raises the OctavoError of a server that is not there at first."""
    from rich.console import Console
    from rich.live import Live

    first = feed.wait()
    if isinstance(first, OctavoError):
        raise first
    record, heard, why = first, time.monotonic(), ""
    speeds: deque[float] = deque([record["tokens_per_second"]], maxlen=NUM_SPEEDS)
    console, keys = Console(highlight=False), Keys()
    with keys.open(), Live(console=console, auto_refresh=False, screen=True) as screen:
        while True:
            silence = time.monotonic() - heard
            problem = problem_of(silence, why) if why or silence > SILENT_SECONDS else ""
            size = console.size
            screen.update(draw(record, speeds, url, size.width, size.height, problem), refresh=True)
            pressed, has_news = keys.wait(feed, 1.0)
            if "q" in pressed.lower():
                return
            if not has_news:
                continue
            news = feed.wait()
            if isinstance(news, OctavoError):
                why = news.message
            else:
                if why:
                    speeds.clear()  # they are of before a gap
                record, heard, why = news, time.monotonic(), ""
                speeds.append(record["tokens_per_second"])


def problem_of(silence: float, why: str) -> str:
    """What to say when there has been no record for `silence` seconds."""
    return f"silent for {silence:.0f} s" + (f", connecting again: {why}" if why else "")


def draw(
    record: Record, speeds: Iterable[float], url: str, width: int, height: int | None = None, problem: str = ""
) -> Group:
    """The whole picture, `width` characters wide, and no higher than `height` lines if that is possible."""
    from rich.console import Group
    from rich.text import Text

    blocks = record["blocks"]
    state = (
        " · the engine is dead" if not record["alive"] else " · the engine is being restarted" * record["restarting"]
    )
    speed = f"{record['tokens_per_second']:8.1f}"
    size = f"{blocks['num_blocks']} blocks of {blocks['block_size']} tokens, {blocks['usage']:.0%} in use"
    num_listed, num_rows = fit(len(record["requests"]["shown"]), height)
    return Group(
        Text(f"octavo top · {record['model']} at {url}{state}", style="bold", no_wrap=True, overflow="ellipsis"),
        Text(problem, style="bold red", no_wrap=True, overflow="ellipsis"),
        Text.assemble((speed, "bold"), " tokens/s  ", (spark(speeds, width - 20), "cyan")),
        *(Text(f"  {line}") for line in figures(record)),
        Text(),
        Text(f"  {size}", style="dim"),
        block_map(blocks["runs"], blocks["num_blocks"], width - 4, num_rows),
        Text(),
        request_table(record["requests"], num_listed),
    )


def fit(num_requests: int, height: int | None) -> tuple[int, int]:
    """How many requests and rows of blocks a terminal of `height` lines shows. The blocks give way first."""
    if height is None:
        return MAX_LISTED, MAP_ROWS
    room = height - NUM_OTHER_LINES
    num_rows = max(MIN_MAP_ROWS, min(MAP_ROWS, room - min(num_requests, MAX_LISTED)))
    return max(1, min(MAX_LISTED, room - num_rows)), num_rows


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


def block_map(runs: Sequence[int], num_blocks: int, width: int, num_rows: int) -> Text:
    from rich.text import Text

    text = Text()
    for index, (owner, shared) in enumerate(cells(runs, num_blocks, width * num_rows)):
        if index % width == 0:
            text.append("\n  " if index else "  ")
        if owner in (FREE, CACHED):
            text.append("·" if owner == FREE else "▪", style="dim")
        else:
            text.append("◆" if shared else "■", style=colour(owner))
    text.append("\n  · free  ▪ cached  ■ in use  ◆ shared", style="dim")
    return text


def request_table(requests: Record, num_listed: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=True, header_style="dim")
    table.add_column("request")
    table.add_column("phase")
    for name in ("prompt", "computed", "output", "preempted"):
        table.add_column(name, justify="right")
    for each in requests["shown"][:num_listed]:
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
