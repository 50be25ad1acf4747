"""The requests that an engine owes an answer to, across the deaths of its process: what each has said so far, and who
is to blame.

Owns which of them the present engine has, in which order the others follow, and the judgement after a crash. Knows no
process, no clock and no text (supervisor.py).

A request *gets on* when it has NUM_PROOF_TOKENS new tokens, or ends. The suspects of a crash are those that the engine
had and that had not got on since; where all had, all. Who gets on is a suspect no more.

    one suspect     it did it, as far as is known. The second time, it is the culprit and fails. (Unless somebody
                    waited in the engine: that may have been the suspect, and then it did nothing.)
    several         nobody is blamed. Who was among them twice is looked at alone

While anybody is to be looked at, the next engine first gets those without suspicion, and when all that it has have got
on and it has room, one more at a time, in the order in which they came. So the next crash has one suspect.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from octavo.engine.messages import TokenDelta
from octavo.request import EngineRequest, FinishReason

# The first may come from the computation of a prompt; what fails may be the steps after it, of one token each.
NUM_PROOF_TOKENS = 2
MAX_CRASHES = 2  # of a request: among the suspects before it is looked at alone, and as the only one before it fails


@dataclass(slots=True, eq=False)
class LiveRequest:
    source: EngineRequest
    token_ids: list[int] = field(default_factory=list)  # its output that has arrived, behind that of `source`
    num_new_tokens: int = 0  # of these, from the present engine
    num_crashes: int = 0  # in a row, with it among the suspects
    num_lone_crashes: int = 0  # of these, those where it was the only one

    @property
    def continuation(self) -> EngineRequest:
        """The rest of it, as a request."""
        if not self.token_ids:
            return self.source
        return replace(self.source, output_token_ids=[*self.source.output_token_ids, *self.token_ids])

    @property
    def gets_on(self) -> bool:
        return self.num_new_tokens >= NUM_PROOF_TOKENS

    @property
    def is_under_suspicion(self) -> bool:
        return self.num_crashes >= MAX_CRASHES or self.num_lone_crashes > 0


@dataclass(frozen=True, slots=True)
class Crash:
    is_explained: bool  # by one suspect
    culprit: EngineRequest | None  # it is live no more
    engine_worked: bool  # a request got on before


class LiveRequests:
    def __init__(self) -> None:
        self._live: dict[str, LiveRequest] = {}  # by request_id, in the order in which they came
        self._outside: dict[str, LiveRequest] = {}  # those that the engine does not have yet
        self._engine_worked = False
        self._is_careful = False  # one more at a time
        self._is_fresh = True  # the engine has not been given anything

    def __len__(self) -> int:
        return len(self._live)

    @property
    def engine_has_any(self) -> bool:
        return len(self._live) > len(self._outside)

    @property
    def engine_has_beams(self) -> bool:
        return any(request.source.beams is not None for request in self._inside())

    @property
    def num_engine_tokens(self) -> int:
        """Prompts and outputs of all that the engine has."""
        return sum(
            len(request.source.prompt_token_ids) + len(request.source.output_token_ids) + len(request.token_ids)
            for request in self._inside()
        )

    def add(self, source: EngineRequest) -> None:
        self._live[source.request_id] = self._outside[source.request_id] = LiveRequest(source)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Their callers want no more of them. Unknown ids are ignored."""
        for request_id in request_ids:
            self._live.pop(request_id, None)
            self._outside.pop(request_id, None)

    def take(self, deltas: Iterable[TokenDelta]) -> None:
        """What the engine has said."""
        for delta in deltas:
            request = self._live.get(delta.request_id)
            if request is None:
                continue
            if delta.finish_reason is not None:
                del self._live[delta.request_id]
                self._engine_worked |= delta.finish_reason is not FinishReason.ERROR
                continue
            request.token_ids += delta.token_ids
            request.num_new_tokens += len(delta.token_ids)
            if request.gets_on:
                request.num_crashes = request.num_lone_crashes = 0
                self._engine_worked = True

    def take_due(self, has_room: bool) -> list[EngineRequest]:
        """Those that the engine is to be given now. They count as given. `has_room`: one more would run at once."""
        if not self._outside:
            return []
        outside = list(self._outside.values())
        due = self._carefully_chosen(outside, has_room) if self._is_careful else outside
        self._is_fresh = False
        for request in due:
            del self._outside[request.source.request_id]
        return [request.continuation for request in due]

    def _carefully_chosen(self, outside: list[LiveRequest], has_room: bool) -> list[LiveRequest]:
        self._is_careful = any(request.is_under_suspicion for request in self._live.values())
        if not self._is_careful:
            return outside
        if self._is_fresh and (unsuspected := [request for request in outside if request.num_crashes == 0]):
            return unsuspected
        return outside[:1] if has_room and all(request.gets_on for request in self._inside()) else []

    def _inside(self) -> list[LiveRequest]:
        return [request for request_id, request in self._live.items() if request_id not in self._outside]

    def crash(self, somebody_waited: bool) -> Crash:
        """The engine is gone. All that live are for the next one, but for the culprit. `somebody_waited`: in the
        engine, to be computed."""
        inside = self._inside()
        suspects = [request for request in inside if not request.gets_on] or inside
        for request in suspects:
            request.num_crashes += 1
        culprit = None
        is_explained = len(suspects) == 1 and not somebody_waited
        if is_explained:
            (suspect,) = suspects
            suspect.num_lone_crashes += 1
            if suspect.num_lone_crashes >= MAX_CRASHES:
                culprit = suspect.source
                del self._live[culprit.request_id]
        crash = Crash(is_explained, culprit, self._engine_worked)
        for request in self._live.values():
            request.num_new_tokens = 0
        self._outside = dict(self._live)
        self._engine_worked, self._is_careful, self._is_fresh = False, True, True
        return crash
