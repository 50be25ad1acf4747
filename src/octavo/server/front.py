"""What the handlers share: the engine, the options, and the rules that hold for every call.

Owns model names, admission, the live calls with their ids, and the bond between a call and its client. A *call* is one
HTTP request; it may hold several engine requests. Knows no route and no body.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import Receive

from octavo.errors import EngineDeadError, InvalidRequestError, NotFoundError, QueueFullError
from octavo.server.errors import ClientGoneError, ShuttingDownError
from octavo.server.live import Live
from octavo.server.response_store import ResponseStore
from octavo.server.tools import ToolCalling
from octavo.server.traces import Tracer

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.config import ServerConfig

T = TypeVar("T")


@dataclass(slots=True)
class Coming:
    """Requests of calls that were admitted, as long as the engine's side does not know of them."""

    num_requests: int = 0
    num_tokens: int = 0  # of their prompts

    def add(self, num_requests: int, num_tokens: int) -> None:
        self.num_requests += num_requests
        self.num_tokens += num_tokens


@dataclass(slots=True, kw_only=True)
class LiveCall:
    """A call that has an id. `key_name` is whose it is, where the server has keys."""

    wanted: str | None  # the id that the client asked for
    num_prompts: int
    key_name: str | None


def engine_request_ids(call_id: str, num_prompts: int) -> list[str]:
    """Those of a call: one for each of its prompts."""
    return [call_id] if num_prompts == 1 else [f"{call_id}-{index}" for index in range(num_prompts)]


class Front:
    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self.llm = llm
        self.config = config
        self.model_names = list(config.served_model_name) or [llm.config.model]
        self.started = int(time.time())
        self.tool_calling = ToolCalling.of(llm, config)
        self.live = Live(llm, self.model_names[0])
        self.responses: ResponseStore | None = None  # without --enable-responses-store none are kept
        if config.enable_responses_store:
            self.responses = ResponseStore(config.responses_store_size, config.responses_store_bytes)
        endpoint = config.otlp_traces_endpoint
        self.tracer = None if endpoint is None else Tracer(endpoint, self.model_names[0])
        self.coming = Coming()
        self._calls: dict[str, LiveCall] = {}  # by their ids
        self._work: set[asyncio.Future[Any]] = set()
        self._stopped = False

    def check_model(self, name: str | None) -> str:
        """The name to echo; a call without one means the model that is there."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(repr(each) for each in self.model_names)
            raise NotFoundError(f"model is {name[:200]!r}; this server has {served}", param="model")
        return name

    def admit(self, priority: int = 0, num_tokens: int = 0) -> None:
        """Refuse what cannot run or must not wait; `num_tokens` are those of all its prompts."""
        if not self.llm.alive:
            raise EngineDeadError("the engine is dead")
        if priority and self.llm.config.scheduling_policy != "priority":
            raise InvalidRequestError(
                f"priority is {priority}; it must be 0 unless the server has --scheduling-policy priority",
                param="priority",
            )
        limit = self.config.max_num_queued_reqs
        if limit is not None and self._num_waiting() >= limit:
            self.llm.metrics.count_rejection("max_num_queued_reqs")
            raise QueueFullError(f"{limit} requests are already waiting (--max-num-queued-reqs)")
        limit = self.config.max_num_queued_tokens
        waiting = 0 if limit is None else self.llm.num_unanswered_tokens + self.coming.num_tokens
        if limit is not None and waiting and waiting + num_tokens > limit:
            self.llm.metrics.count_rejection("max_num_queued_tokens")
            raise QueueFullError(
                f"{waiting} prompt tokens are already waiting, and this call has {num_tokens}; "
                f"at most {limit} may wait (--max-num-queued-tokens)"
            )

    def _num_waiting(self) -> int:
        """Waiting requests after the last step, and those on their way to the engine that will not run at once."""
        stats = self.llm.stats
        unseen = self.llm.num_unfinished + self.coming.num_requests - stats.num_running - stats.num_waiting
        free = self.llm.config.max_num_seqs - stats.num_running
        return stats.num_waiting + max(0, unseen - free)

    @contextmanager
    def call_id(self, prefix: str, call: LiveCall) -> Iterator[str]:
        """An id that no other live call and no stored response has: the client's where it gave one that is free."""
        call_id = f"{prefix}{call.wanted}" if call.wanted else ""
        if not call.wanted or call_id in self._calls or (self.responses is not None and call_id in self.responses):
            call_id = f"{prefix}{uuid.uuid4().hex}"
        self._calls[call_id] = call
        try:
            yield call_id
        finally:
            del self._calls[call_id]

    async def abort(self, request_ids: Collection[str], key_name: str | None) -> list[str]:
        """End the live calls of that key that have one of these ids: their own, or the one that the client asked for.
        Returns their own. Ids that nobody has pass."""
        ended = []
        for call_id, call in list(self._calls.items()):
            if call.key_name == key_name and (call_id in request_ids or call.wanted in request_ids):
                ended.append(call_id)
                for request_id in engine_request_ids(call_id, call.num_prompts):
                    await self.llm.abort(request_id)
        return ended

    async def attend(self, work: Awaitable[T], receive: Receive) -> T:
        """The result of `work`, which is cancelled as soon as the client goes away or the server stops.

        The body must have been read: from then on `receive` has only the disconnect to report.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnect(receive))
        self._work.add(task)
        if self._stopped:  # it has begun by then, and closes what it holds
            asyncio.get_running_loop().call_soon(task.cancel)
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGoneError("the client closed its connection")
            if task.cancelled():
                raise ShuttingDownError("the server is shutting down")
            return task.result()
        finally:
            gone.cancel()
            self._work.discard(task)
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # seen, if the race was lost to it

    @property
    def num_calls(self) -> int:
        """Calls at work. Those who only look on do not count."""
        return max(0, len(self._work) - self.live.num_listeners)

    def stop(self) -> None:
        """End every call now, and each that is still to come; each client gets an error."""
        self._stopped = True
        for task in self._work:
            task.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
