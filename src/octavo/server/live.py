"""GET /live: what the server does, as server-sent events, for as long as somebody looks.

Owns the one clock for all who look on, and the record that they all get. While nobody does, there is no clock and the
engine is asked nothing. A listener that reads slowly misses records; none wait for it. Of prompts, answers and request
ids nothing is in a record: requests are small numbers in it.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import AsyncGenerator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.errors import ShuttingDownError
from octavo.server.sse import event, open_stream

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.engine.messages import Picture, SchedulerStats
    from octavo.server.front import Front

FREE, CACHED = 0, -1  # blocks that no request holds
INTERVAL_SECONDS = 0.5
ANSWER_SECONDS = 0.05  # for the engine to answer; where its step takes longer, the picture is that of the last time
RATE_SECONDS = 2.0  # tokens per second are those of the last ones
FIRST_TOKEN_SECONDS = 60.0  # and the mean time to first token that of the last minute


async def watch(front: Front, request: Request) -> Response:
    """What the server does, twice a second: requests, rates, the KV blocks.

    Of the blocks `runs` tells, from the first block on: how many in a row are alike, whose they are (0 nobody's, -1
    cached, else the number of a request), and how many requests share each."""
    return await open_stream(front, front.live.events(), request.receive)


class Live:
    """One task takes a picture for all listeners, and lives while there are any."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self.num_listeners = 0
        self._llm = llm
        self._model_name = model_name
        self._closed = False
        self._old_picture: Picture | None = None  # of when somebody last looked
        self._clock: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes | None]  # the next event; None: there is none
        self._totals: deque[tuple[float, int]] = deque()  # (time.monotonic(), tokens generated since the start)

    async def events(self) -> AsyncGenerator[bytes, None]:
        if self._closed:
            raise ShuttingDownError("the server is shutting down")
        if self._clock is None:
            self._old_picture = self._llm.picture
            self._next = asyncio.get_running_loop().create_future()
            self._clock = asyncio.create_task(self._run(), name="octavo-live")
        self.num_listeners += 1
        try:
            while (data := await asyncio.shield(self._next)) is not None:
                yield data
        finally:
            self.num_listeners -= 1
            if self.num_listeners == 0:
                self._stop()

    def close(self) -> None:
        """Every stream ends, and no new one begins."""
        self._closed = True
        if self._clock is not None:
            self._next.set_result(None)
            self._stop()

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        self._totals.clear()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._llm.request_picture()
            await asyncio.sleep(ANSWER_SECONDS)
            ready, self._next = self._next, loop.create_future()
            try:
                ready.set_result(event(self._record()))
            except Exception as error:
                ready.set_exception(error)
            await asyncio.sleep(INTERVAL_SECONDS - ANSWER_SECONDS)

    def _record(self) -> dict[str, Any]:
        llm, stats = self._llm, self._llm.stats
        picture = self._picture()
        return {
            "time": time.time(),
            "model": self._model_name,
            "alive": llm.alive,
            "restarting": llm.restarting,
            "tokens_per_second": self._tokens_per_second(llm.metrics.num_generation_tokens),
            "first_token_seconds": llm.metrics.mean_first_token(FIRST_TOKEN_SECONDS),
            "num_generation_tokens": llm.metrics.num_generation_tokens,
            "prefix_cache_hit_rate": _ratio(stats.prefix_cache_hits, stats.prefix_cache_queries),
            "num_preemptions": stats.num_preemptions,
            "num_swaps": stats.num_swaps,
            "num_restarts": stats.num_restarts,
            "requests": _requests(picture, stats),
            "blocks": {
                "num_blocks": llm.info.num_blocks,
                "block_size": llm.info.block_size,
                "usage": stats.kv_cache_usage,
                "runs": runs(picture, llm.info.num_blocks),
            },
        }

    def _picture(self) -> Picture | None:
        """None where the last one shows what is no more: of an engine that has died, or of long ago."""
        picture = self._llm.picture
        is_over = not self._llm.alive or self._llm.restarting or picture is self._old_picture
        return None if is_over else picture

    def _tokens_per_second(self, total: int) -> float:
        now = time.monotonic()
        while self._totals and self._totals[0][0] < now - RATE_SECONDS:
            self._totals.popleft()
        self._totals.append((now, total))
        since, earlier = self._totals[0]
        return _ratio(total - earlier, now - since) or 0.0


def _requests(picture: Picture | None, stats: SchedulerStats) -> dict[str, Any]:
    if picture is None:  # in a long step the phases are not known yet, and prompts are what makes a step long
        return {"num_waiting": stats.num_waiting, "num_prefill": stats.num_running, "num_decode": 0, "shown": []}
    return {
        "num_waiting": picture.num_waiting,
        "num_prefill": picture.num_prefill,
        "num_decode": picture.num_decode,
        "shown": [each._asdict() for each in picture.requests],
    }


def runs(picture: Picture | None, num_blocks: int) -> list[int]:
    """Flat triples: how many blocks are alike, whose they are, how many hold each. The first in the tables owns what is
    shared.

        block      0   1   2   3   4   5   6
        owner      1   1   2   2  -1   0   0      FREE, CACHED, or the number of a request
        num_refs   2   1   1   1   0   0   0      → 1 1 2  1 1 1  2 2 1  1 -1 0  2 0 0
    """
    owners, num_refs = [FREE] * num_blocks, [0] * num_blocks
    if picture is not None:
        for block_id in array("i", picture.cached):
            owners[block_id] = CACHED
        for number, table in reversed(picture.tables):
            for block_id in array("i", table):
                owners[block_id] = number
                num_refs[block_id] += 1
    flat: list[int] = []
    for (owner, refs), run in groupby(zip(owners, num_refs, strict=True)):
        flat += (sum(1 for _ in run), owner, refs)
    return flat


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
