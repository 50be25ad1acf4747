"""`octavo serve` as a program whose scheduler, blocks and beams are real; the numbers are made up (fake_runner.py).

python control_plane_server.py [options of octavo serve]
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from octavo import async_llm
from octavo.async_llm import AsyncLLM
from octavo.cli.main import main
from octavo.text.chat_template import load_chat_template
from support.fake_runner import make_engine
from support.front import LocalClient, small_front_end, small_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
MAX_MODEL_LEN = 64

start_with = AsyncLLM.start


async def start(config: Any, **options: Any) -> AsyncLLM:
    engine = make_engine(max_model_len=MAX_MODEL_LEN, num_blocks=64, max_num_seqs=8)
    return await start_with(config, LocalClient(engine), **options)


if __name__ == "__main__":
    front_end = dataclasses.replace(small_front_end(), chat_template=load_chat_template(TEMPLATE, small_tokenizer()))
    async_llm.load_front_end = lambda config: front_end  # type: ignore[assignment]
    AsyncLLM.start = start  # type: ignore[method-assign, assignment]
    sys.exit(main(["serve", "tiny", *sys.argv[1:]]))
