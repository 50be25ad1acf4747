"""The rows that a request has in a step: itself, or its beams. Owns the beam groups of the unfinished requests."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.beam_group import BeamGroup
from octavo.core.kv_manager import KVManager
from octavo.request import Request


class Rows:
    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._groups: dict[str, BeamGroup] = {}  # by request_id

    def add(self, request: Request, max_output_tokens: int) -> None:
        """`max_output_tokens`: what the context and the pool leave room for."""
        beams = request.source.beams
        if beams is not None:
            self._groups[request.request_id] = BeamGroup(request, min(beams.max_tokens, max_output_tokens))

    def remove(self, request: Request) -> None:
        self._groups.pop(request.request_id, None)

    def group(self, request: Request) -> BeamGroup:
        """Of a beam search."""
        return self._groups[request.request_id]

    def all(self, request: Request) -> Sequence[Request]:
        return (request,) if request.source.beams is None else self.group(request).rows

    def with_blocks(self, request: Request) -> list[Request]:
        return [row for row in self.all(request) if self._kv.holds_blocks(row)]

    def pending(self, request: Request) -> Sequence[Request]:
        """Those of a running request to compute now."""
        return (request,) if request.source.beams is None else self.group(request).pending(self._kv)

    def are_rebuilt(self, request: Request) -> bool:
        """Whether beams have lost their blocks, and some have yet to get new ones."""
        return request.source.beams is not None and not all(map(self._kv.holds_blocks, self.group(request).rows))

    def are_decodes(self, request: Request) -> bool:
        """Whether each has one token to compute."""
        if request.source.beams is None:
            return request.num_left == 1
        group = self.group(request)
        return group.num_left <= len(group.rows)

    def forget_computed(self, request: Request) -> None:
        """Their blocks are gone."""
        if request.source.beams is not None:
            self.group(request).lose_blocks()
        request.num_computed_tokens = 0
