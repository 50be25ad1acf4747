"""An engine process with the fake engine, started by the tests in place of `python -m octavo.engine.process`."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from octavo.engine.process import run
    from support.front import build_fake_engine

    sys.exit(run(build_fake_engine, sys.argv[1:]))
