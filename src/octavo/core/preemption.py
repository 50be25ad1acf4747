"""What becomes of the KV of a request that has to give way: computed again later, or swapped out and in.

Knows costs, no blocks. Who gives way is policy.py's matter. Both ways lead to the same bytes.
"""

from __future__ import annotations

from typing import Protocol

from octavo.core.plan import RestoreBlock, SaveBlock, StepPlan, StepResult
from octavo.errors import ConfigError

_WEIGHT = 0.2  # of the newest measurement in a running mean
_MAX_RECOMPUTES = 50  # in a row, before swapping is measured again: its first time also paid for new memory
_FEW_TOKENS = 16  # a step of fewer tokens reads weights more than it computes: its time says nothing of a prompt's


class Preemption(Protocol):
    def swaps(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether to swap out a request that has computed `num_tokens` tokens, in `num_blocks` blocks."""

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """A step is done; `result` has its times."""


class Recompute:
    def swaps(self, num_tokens: int, num_blocks: int) -> bool:
        return False

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        pass


class Swap(Recompute):
    def swaps(self, num_tokens: int, num_blocks: int) -> bool:
        return True


class Auto:
    """Whichever took less time so far. What swapping costs is known only after it was done: it goes first, and has
    another try now and then."""

    def __init__(self) -> None:
        self.seconds_per_token: float | None = None  # of a prompt
        self.seconds_per_block: float | None = None  # one way
        self._num_recomputes = 0  # since the last swap

    def swaps(self, num_tokens: int, num_blocks: int) -> bool:
        swaps = self._is_cheaper(num_tokens, num_blocks) or self._num_recomputes == _MAX_RECOMPUTES
        self._num_recomputes = 0 if swaps else self._num_recomputes + 1
        return swaps

    def _is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        if self.seconds_per_block is None or self.seconds_per_token is None:
            return True
        return 2 * num_blocks * self.seconds_per_block < num_tokens * self.seconds_per_token

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        num_tokens = plan.num_scheduled_tokens
        if num_tokens >= _FEW_TOKENS and not result.failed:
            self.seconds_per_token = _mean(self.seconds_per_token, result.compute_seconds / num_tokens)
        swapped = [each for each in plan.transfers if isinstance(each, (SaveBlock, RestoreBlock))]
        if swapped and not result.failed:
            seconds = result.transfer_seconds / len(plan.transfers)
            self.seconds_per_block = _mean(self.seconds_per_block, seconds)


def _mean(so_far: float | None, newest: float) -> float:
    return newest if so_far is None else so_far + _WEIGHT * (newest - so_far)


def make_preemption(mode: str) -> Preemption:
    """`mode` as in `EngineConfig.preemption_mode`; any other: ConfigError."""
    match mode:
        case "recompute":
            return Recompute()
        case "swap":
            return Swap()
        case "auto":
            return Auto()
    raise ConfigError(f"preemption_mode is {mode!r}; allowed: recompute, swap, auto", param="preemption_mode")
