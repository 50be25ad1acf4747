"""An engine that outlives its process: when that dies or hangs, another takes its place, and every request goes on.

Owns the processes one after the other, the beat at which they are looked after, and the moment of giving up. Whether an
engine is well is watch.py's; who waits for which engine, and who is to blame, live_requests.py's.

What a request has said is what `receive` has given out, and nothing else. The next engine gets the request with these
tokens, and since the same request has the same bytes, the one after them is the one that would have come: no token is
lost, repeated or changed, wherever the old process was cut off.

    working ──── its process ends ───► restarting ──── the next one is ready ───► working
       ╰─ it is not well: it is killed                      ╰─ MAX_FAILURES in FAILURE_SECONDS, or it cannot start: dead

Beside a working engine stands a process that has imported all that an engine needs, and waits: half of the time from a
crash to the next token would else be Python's start and imports. It holds no model.

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
from octavo.engine.watch import Watch
from octavo.errors import EngineDeadError, OctavoError
from octavo.request import EngineRequest, FinishReason

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
FAILURE_SECONDS = 60.0  # with an engine there: a start that hangs for minutes is no rest
START_FACTOR = 10  # a start may take so many times what the first one took, and `engine_timeout`


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
        self._standby: ProcessClient | None = None
        self._requests = LiveRequests()
        self._watch = Watch(config.engine_timeout)
        self._watching: asyncio.Task[None] | None = None
        self._is_wanted = asyncio.Event()  # somebody has needed the engine, or asked how it is
        self._earlier: SchedulerStats | None = None  # of the engines before the present one
        self._start_seconds = 0.0  # of the first start
        self._up_since = 0.0  # time.monotonic(), seconds: when the present engine was there
        self._up_seconds = 0.0  # how long there was one before
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)  # each in these seconds
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
        self._watching = asyncio.create_task(self._keep_watch(), name="octavo-engine-watch")

    def add_request(self, request: EngineRequest) -> None:
        self._check_alive()
        self._is_wanted.set()
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

    def look_after(self) -> None:
        self._is_wanted.set()

    async def receive(self) -> list[TokenDelta]:
        """An empty list also when the engine has died, and when it is there again."""
        self._check_alive()
        try:
            deltas = await (self._restart() if self._restarting else self._engine.receive())
        except EngineDeadError as error:
            if self._end is not None:
                raise
            return await self._take_crash(error.message)
        self._requests.take(deltas)
        stats = self._engine.stats
        self._watch.take(deltas, stats)
        self.stats = stats if self._earlier is None else stats.following(self._earlier)
        self._submit()
        return deltas

    async def close(self) -> None:
        self._end = self._end or "the engine process is gone (closed)"
        self._restarting = False
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._standby is not None:
            await self._standby.close()
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
                self._watch.give(len(request.prompt_token_ids) + len(request.output_token_ids))

    # ── An engine at work ────────────────────────────────────────────────────────────────────────────────────────

    async def _keep_watch(self) -> None:
        """Kills an engine that is not well: `receive` takes that for a death like any other. One that has nothing to do
        and has given a sign of life is left alone until somebody wants it, so that an idle server never wakes up."""
        while True:
            await asyncio.sleep(self._watch.beat_seconds)
            engine = self._engine
            if self._restarting or not engine.alive:
                continue
            # Who asks from here on is answered by a later beat than this one.
            is_wanted, owes_beat = self._is_wanted.is_set(), engine.owes_beat
            self._is_wanted.clear()
            wrong = self._watch.beat(self._requests, has_unread=engine.has_news, was_heard=engine.ask_for_beat())
            if wrong is not None:
                logger.error("%s: it is killed", wrong)
                engine.kill()
                continue
            self._stand_by()
            if not (is_wanted or owes_beat or len(self._requests)):
                await self._is_wanted.wait()

    def _stand_by(self) -> None:
        """See that there is a process that can be the next engine."""
        standby = self._standby or self._make_client(self._config)
        if standby.is_standby:
            return
        try:
            standby.spawn()
        except EngineDeadError as error:  # the next beat tries again
            logger.warning("no process stands by for the engine: %s", error.message)
        else:
            self._standby = standby

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
        self._engine, self._standby = self._standby or self._make_client(self._config), None
        self._watch.begin()
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
