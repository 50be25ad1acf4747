"""The beams of one request as rows of a step: each has a block table of its own, and a step of the search is a fork and
a free of tables.

Owns the rows and their next tokens until all rows have some. Which beams follow is beams.py's choice; when rows run is
the scheduler's.
"""

from __future__ import annotations

from array import array

from octavo.core.beams import BeamSearch
from octavo.core.kv_manager import KVManager
from octavo.core.prefix_index import common_prefix
from octavo.request import Request, TokenLogprobs


class BeamGroup:
    """`request` stands for the whole group in the scheduler's queues; it has no blocks itself. `max_tokens`: of the
    output."""

    def __init__(self, request: Request, max_tokens: int) -> None:
        source = request.source
        assert source.beams is not None
        end_token_ids = [] if source.beams.ignore_eos else source.eos_token_ids
        self.request = request
        self.search = BeamSearch(source.beams, end_token_ids, max_tokens)
        self.rows = [_row(request)]  # one for each beam, best first
        self._next_tokens: dict[Request, TokenLogprobs] = {}

    @property
    def num_left(self) -> int:
        return sum(row.num_left for row in self.rows)

    @property
    def is_complete(self) -> bool:
        """Whether every beam has its next tokens."""
        return len(self._next_tokens) == len(self.rows)

    def pending(self, kv: KVManager) -> list[Request]:
        """The rows to compute now: all, but after the group has lost its blocks. Then the first is computed alone, and
        each further one forks from the one that it shares most tokens with."""
        there = [row for row in self.rows if kv.holds_blocks(row)]
        pending = [row for row in there if row.num_left > 0]
        if pending or len(there) == len(self.rows):
            return pending
        row = next(row for row in self.rows if not kv.holds_blocks(row))
        shared = [common_prefix(other.token_ids, row.token_ids) for other in there]
        num_shared = min(max(shared), row.num_tokens - 1)
        kv.fork(there[shared.index(max(shared))], row, num_shared)
        row.num_computed_tokens = num_shared
        return [row]

    def take(self, row: Request, next_tokens: TokenLogprobs) -> None:
        self._next_tokens[row] = next_tokens

    def advance(self, kv: KVManager) -> bool:
        """The next beams take the place of these. False: there are none, the search is over."""
        successors = self.search.advance([self._next_tokens.pop(row) for row in self.rows])
        rows: list[Request] = []
        for successor in successors:
            row = self.rows[successor.parent]
            rows.append(self._fork(row, kv) if row in rows else row)
        for row in self.rows:
            if row not in rows:
                kv.free(row)
        for row, successor in zip(rows, successors, strict=True):
            row.token_ids.append(successor.token_id)
        self.rows = rows
        return bool(rows)

    def lose_blocks(self) -> None:
        """All that the rows have computed is gone."""
        for row in self.rows:
            row.num_computed_tokens = 0
            row.num_preemptions += 1
        self._next_tokens.clear()

    def _fork(self, parent: Request, kv: KVManager) -> Request:
        child = _row(parent)
        kv.fork(parent, child, parent.num_computed_tokens)
        child.num_computed_tokens = parent.num_computed_tokens
        return child


def _row(request: Request) -> Request:
    row = Request(request.source, array("i", request.token_ids), status=request.status)
    row.sampling = request.sampling  # the same for all beams: nothing in it depends on their tokens
    return row
