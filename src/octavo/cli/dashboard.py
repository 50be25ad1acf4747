"""`octavo dashboard`: the Grafana dashboard that comes with octavo, as JSON on the standard output.

Its file is server/grafana.json; what it draws is what /metrics says (engine/metrics.py, server/http_metrics.py).
"""

from __future__ import annotations

import sys
from importlib.resources import files

from octavo.cli.parser import Parser

DESCRIPTION = (
    "Print a Grafana dashboard of octavo's /metrics. Import it (Dashboards, New, Import), or put it into a folder "
    "that Grafana provisions; docs/deploy.md has both, and Prometheus' part."
)


def run(argv: list[str]) -> int:
    Parser("octavo dashboard", DESCRIPTION, "> octavo.json").parse_args(argv)
    sys.stdout.write(files("octavo.server").joinpath("grafana.json").read_text(encoding="utf-8"))
    return 0
