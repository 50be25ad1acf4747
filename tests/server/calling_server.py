"""`octavo serve` as a program, whose model says a text and a call of each tool in tests/support/tools.py.

python calling_server.py [options of octavo serve]
"""

from __future__ import annotations

import sys
from typing import Any

from octavo.async_llm import AsyncLLM
from octavo.cli.main import main
from support.scripted_engine import scripted_llm
from support.tools import TEXT_AND_CALLS


async def start(*args: Any, **options: Any) -> AsyncLLM:
    llm, engine = scripted_llm(max_model_len=args[0].max_model_len or 4096)
    engine.script = lambda request: [*engine.tokenizer.encode(TEXT_AND_CALLS), 2]
    return llm


if __name__ == "__main__":
    AsyncLLM.start = start  # type: ignore[method-assign, assignment]
    sys.exit(main(["serve", "tiny", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", *sys.argv[1:]]))
