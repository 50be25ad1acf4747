"""An engine that outlives its process: when that dies or hangs, another takes its place, and every request goes on.

Owns the processes one after the other, the patience with each, and the moment of giving up. Who waits for which engine,
and who is to blame, is live_requests.py's.

What a request has said is what `receive` has given out, and nothing else. The next engine gets the request with these
tokens, and since the same request has the same bytes, the one after them is the one that would have come: no token is
lost, repeated or changed, wherever the old process was cut off.

    working ──── its process ends ───► restarting ──── the next one is ready ───► working
       ╰─ no step for `engine_timeout`: it is killed        ╰─ MAX_FAILURES in FAILURE_SECONDS, or it cannot start: dead

A crash counts as a failure where no single request is the suspect; where the engine has worked since the last one, the
count begins again. So an engine that gets requests on, however often it is killed, is never given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec

from octavo.config import EngineConfig
from octavo.core.picture import Picture
from octavo.engine.client import ProcessClient
from octavo.engine.live_requests import MAX_CRASHES, LiveRequests
from octavo.engine.messages import EngineInfo, SchedulerStats, TokenDelta, callers_id
from octavo.errors import EngineDeadError, OctavoError
from octavo.request import EngineRequest, FinishReason

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
FAILURE_SECONDS = 60.0  # with an engine there: a start that hangs for minutes is no rest
START_FACTOR = 10  # a start may take so many times what the first one took, and `engine_timeout`
SECOND_LOOK_SECONDS = 0.05  # for replies that have arrived, but were not read: this process itself stood still


class SupervisedClient:
    """An EngineClient whose `receive` raises only when the engine is given up.

    `make_client`: what starts an engine in a process of its own.
    """

    info: EngineInfo

    def __init__(
        self, config: EngineConfig, *, make_client: Callable[[EngineConfig], ProcessClient] = ProcessClient
    ) -> None:
        self.stats = SchedulerStats()
        self._config = config
        self._make_client = make_client
        self._engine = make_client(config)
        self._requests = LiveRequests()
        self._earlier: SchedulerStats | None = None  # of the engines before the present one
        self._start_seconds = 0.0  # of the first start
        self._up_since = 0.0  # time.monotonic(), seconds: when the present engine was there
        self._up_seconds = 0.0  # how long there was one before
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)  # each in these seconds
        self._deadline: asyncio.Timeout | None = None  # of the `receive` that is waiting
        self._restarting = False
        self._end: str | None = "the engine has not been started"  # why no request is taken

    @property
    def alive(self) -> bool:
        return self._end is None

    @property
    def picture(self) -> Picture | None:
        return self._engine.picture

    @property
    def restarting(self) -> bool:
        return self._restarting

    def launch(self) -> None:
        """As ProcessClient.launch."""
        self._engine.launch()

    async def start(self) -> None:
        start = time.monotonic()
        await self._engine.start()
        self._up_since = time.monotonic()
        self._start_seconds = self._up_since - start
        self._end = None
        self.info, self.stats = self._engine.info, self._engine.stats
        # The next engines are to be like the first, however much memory is free by then.
        self._config = dataclasses.replace(
            self._config, num_gpu_blocks_override=self.info.num_blocks, max_model_len=self.info.max_model_len
        )

    def add_request(self, request: EngineRequest) -> None:
        self._check_alive()
        self._requests.add(request)
        self._submit()

    def abort(self, request_ids: list[str]) -> None:
        self._requests.remove(request_ids)
        if not self._restarting:
            self._engine.abort(request_ids)

    def reset_prefix_cache(self) -> None:
        self._check_alive()
        with contextlib.suppress(EngineDeadError):  # the next engine begins without a cache
            self._engine.reset_prefix_cache()

    def request_picture(self) -> None:
        if not self._restarting:
            self._engine.request_picture()

    async def receive(self) -> list[TokenDelta]:
        """An empty list also when the engine has died, and when it is there again."""
        self._check_alive()
        try:
            deltas = await (self._restart() if self._restarting else self._receive())
        except EngineDeadError as error:
            if self._end is not None:
                raise
            return await self._take_crash(error.message)
        self._requests.take(deltas)
        stats = self._engine.stats
        self.stats = stats if self._earlier is None else stats.following(self._earlier)
        self._submit()
        return deltas

    async def close(self) -> None:
        self._end = self._end or "the engine process is gone (closed)"
        self._restarting = False
        await self._engine.close()

    def _check_alive(self) -> None:
        if self._end is not None:
            raise EngineDeadError(self._end)

    def _submit(self) -> None:
        """Give the engine, if there is one, what it is to have."""
        if self._restarting:
            return
        stats = self._engine.stats
        has_room = stats.num_waiting == 0 and stats.num_running < self.info.max_num_seqs
        due = self._requests.take_due(has_room)
        with contextlib.suppress(EngineDeadError):  # `receive` will notice; they are given to the next engine
            for request in due:
                self._engine.add_request(request)
        if due and self._deadline is not None and self._deadline.when() is None:
            self._deadline.reschedule(self._next_deadline())

    # ── An engine at work ────────────────────────────────────────────────────────────────────────────────────────

    async def _receive(self) -> list[TokenDelta]:
        """Its next news; none where it was killed because there were none for too long."""
        try:
            async with asyncio.timeout_at(self._next_deadline()) as self._deadline:
                return await self._engine.receive()
        except TimeoutError:
            await asyncio.sleep(SECOND_LOOK_SECONDS)
            if not self._engine.has_news:
                logger.error("the engine has finished no step for %g s: it is killed", self._config.engine_timeout)
                self._engine.kill()
            return []
        finally:
            self._deadline = None

    def _next_deadline(self) -> float | None:
        """When the engine has to have finished a step, in the event loop's time; None while it has nothing to do."""
        if not self._config.engine_timeout or not self._requests.engine_has_any:
            return None
        return asyncio.get_running_loop().time() + self._config.engine_timeout

    # ── From one engine to the next ──────────────────────────────────────────────────────────────────────────────

    async def _take_crash(self, cause: str) -> list[TokenDelta]:
        """Judge it. The last words of the request that is to blame, if one is. EngineDeadError: there is no hope."""
        if not self._restarting:
            self._up_seconds += time.monotonic() - self._up_since
        self._restarting = True
        crash = self._requests.crash(somebody_waited=self._engine.stats.num_waiting > 0)
        if crash.engine_worked:
            self._failures.clear()
        if not crash.is_explained:
            self._failures.append(self._up_seconds)
        self._earlier = self.stats = msgspec.structs.replace(
            self.stats, num_running=0, num_waiting=len(self._requests), kv_cache_usage=0.0
        )
        await self._engine.close()  # its memory is free before the next one takes its own
        if len(self._failures) == MAX_FAILURES and self._failures[-1] - self._failures[0] < FAILURE_SECONDS:
            raise self._give_up(f"it died {MAX_FAILURES} times within {FAILURE_SECONDS:g} s; the last time, {cause}")
        logger.error("%s; it is started again, for %d requests that go on", cause, len(self._requests))
        if crash.culprit is None:
            return []
        why = f"the engine died {MAX_CRASHES} times in a row while it computed this request, and no other ({cause})"
        request_id = callers_id(crash.culprit.request_id)
        logger.error("request %s fails: %s", request_id, why, extra={"request_id": request_id})
        return [TokenDelta(crash.culprit.request_id, finish_reason=FinishReason.ERROR, error=why)]

    async def _restart(self) -> list[TokenDelta]:
        """Start the next engine. It has no news yet."""
        assert self._earlier is not None, "a crash comes first"
        start = time.monotonic()
        timeout = self._config.engine_timeout
        self._engine = self._make_client(self._config)
        try:
            async with asyncio.timeout(timeout + START_FACTOR * self._start_seconds if timeout else None):
                await self._engine.start()
        except TimeoutError:
            raise EngineDeadError("the engine process did not get ready") from None
        except EngineDeadError:
            raise
        except OctavoError as error:
            raise self._give_up(f"it cannot start again: {error.message}") from error
        self._earlier = msgspec.structs.replace(self._earlier, num_restarts=self._earlier.num_restarts + 1)
        self._restarting = False
        self._up_since = time.monotonic()
        logger.warning("the engine is there again after %.2f s", self._up_since - start)
        return []

    def _give_up(self, why: str) -> EngineDeadError:
        self._end = f"the engine is given up: {why}"
        return EngineDeadError(self._end)
