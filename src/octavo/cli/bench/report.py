"""What becomes of figures: percentiles, tables, and JSON that says what was measured, with what and where."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import octavo
from octavo.config import EngineConfig
from octavo.errors import ConfigError

PERCENTILES = (10, 25, 50, 75, 90, 99)


def percentile(values: Sequence[float], share: float) -> float:
    """What `share` percent of `values` do not exceed, by linear interpolation."""
    ranked = sorted(values)
    place = share / 100 * (len(ranked) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (place - below) * (ranked[above] - ranked[below])


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The PERCENTILES of `values`, under their numbers as text."""
    return {str(share): percentile(values, share) for share in PERCENTILES}


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int = 1) -> None:
    """Prints a table after an empty line; the first columns are text, the others are figures."""
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    print(f"\n{title}")
    for line in lines:
        cells = zip(line, widths, strict=True)
        aligned = (f"{cell:<{w}}" if i < num_text_columns else f"{cell:>{w}}" for i, (cell, w) in enumerate(cells))
        print("  ".join(aligned).rstrip())


def write_json(args: argparse.Namespace, figures: dict[str, Any], config: EngineConfig | None = None) -> None:
    """Writes `figures` to --output-json, where that is given, after what is needed to measure them again."""
    if args.output_json is None:
        return
    engine = {} if config is None else {"engine": dataclasses.asdict(config)}
    record = {
        "command": args.command_line,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "octavo": octavo.__version__,
        "commit": _commit(),
        "machine": machine(),
        **engine,
        **figures,
    }
    args.output_json.write_text(json.dumps(record, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """What `write_json` wrote, or another program. Raises ConfigError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def machine() -> dict[str, Any]:
    """What `octavo collect-env` says, without places of files and names of builds."""
    from octavo.cli.collect_env import collect

    facts = collect()
    del facts["octavo"]  # stands beside it
    return {
        **facts,
        "python": facts["python"].partition(" ")[0],
        "system": facts["system"].partition(",")[0],
    }


def _commit() -> str | None:
    """Of the checkout that octavo runs from, `-dirty` where files differ from it; None for an installed package."""
    root = Path(octavo.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        words = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
