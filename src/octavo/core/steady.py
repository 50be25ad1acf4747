"""Steps that are like the one before them, one token further: then its plan is moved on, and no new one made.

Nearly all steps are: whoever runs decodes, nobody comes or goes. Knows what makes them so, and what a plan needs to go
on; when it may, the scheduler decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.kv_manager import KVManager
from octavo.core.plan import RequestUpdate, StepPlan
from octavo.request import Request


def is_steady(plan: StepPlan, updates: Sequence[RequestUpdate], running: Sequence[Request]) -> bool:
    """Whether, after this plan's step, all that run were in it with one token, have a new one, and go on. A beam has no
    news of its own, so no search is ever among them."""
    num_rows = len(plan.scheduled)
    if not num_rows == len(running) == len(updates) == plan.num_scheduled_tokens or plan.preempted or plan.outgrown:
        return False
    # The numbers can also agree where one left and another came, or where a prompt that reports got a single token.
    return all(row.samples and row.request.finish_reason is None and not row.forks for row in plan.scheduled)


def move_on(plan: StepPlan, kv: KVManager) -> bool:
    """Make a steady plan that of the next step. False for want of blocks: then somebody has to give way."""
    for row in plan.scheduled:
        row.start += 1
        if row.start % kv.block_size == 0 and not kv.allocate(row.request, row.start + 1):
            return False
    return True
