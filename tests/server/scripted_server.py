"""`octavo serve` as a program, with a scripted engine in place of a model.

python scripted_server.py STEP_SECONDS LOAD_SECONDS [options of octavo serve]
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from octavo.async_llm import AsyncLLM
from octavo.cli.main import main
from support.scripted_engine import scripted_llm


async def start(*args: Any, **options: Any) -> AsyncLLM:
    await asyncio.sleep(float(sys.argv[2]))
    config = args[0]
    llm, engine = scripted_llm(max_model_len=config.max_model_len or 4096)
    engine.step_seconds = float(sys.argv[1])
    return llm


if __name__ == "__main__":
    AsyncLLM.start = start  # type: ignore[method-assign, assignment]
    sys.exit(main(["serve", "tiny", *sys.argv[3:]]))
