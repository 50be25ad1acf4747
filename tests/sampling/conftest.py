from __future__ import annotations

from types import ModuleType

import pytest

from octavo.ops import isa
from octavo.sampling.sampler import Sampler


@pytest.fixture(params=isa.available())
def native(request: pytest.FixtureRequest) -> ModuleType:
    """Each instruction-set variant that this machine can run."""
    return isa.load(request.param)


@pytest.fixture
def sampler(native: ModuleType) -> Sampler:
    return Sampler(native, native.ThreadPool(1))
