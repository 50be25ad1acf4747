"""`octavo serve` as a program, whose engine is real and has faults.

python faulty_server.py FAULTS [options of octavo serve]        FAULTS: a file that `write_faults` has written
python faulty_server.py --engine FAULTS                         its engine's process
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from octavo.config import EngineConfig
    from octavo.engine.engine import Engine
    from support.faults import StruckRunner

    def build(config: EngineConfig) -> Engine:
        from octavo.engine.build import build_engine

        engine = build_engine(config)
        engine.runner = StruckRunner(engine.runner, Path(sys.argv[2]))
        return engine

    if sys.argv[1] == "--engine":
        from octavo.engine.process import run

        sys.exit(run(build))

    from octavo.cli.main import main
    from octavo.engine import client

    client.ENGINE_COMMAND = (sys.executable, __file__, "--engine", sys.argv[1])
    sys.exit(main(["serve", *sys.argv[2:]]))
