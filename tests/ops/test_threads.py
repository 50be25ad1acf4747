"""Which CPUs the kernels get: from what the system says, and from made-up measurements."""

from __future__ import annotations

import pytest

from octavo.ops import cgroup, isa, threads
from octavo.ops.threads import choose_cpus, without_idle_halves


def machine(core_of: dict[int, int]):
    """Each core does 100, whatever the number of its CPUs that are asked."""
    asked = []

    def measure_work(cpus: list[int]) -> float:
        asked.append(cpus)
        return 100.0 * len({core_of[cpu] for cpu in cpus})

    return measure_work, asked


@pytest.mark.parametrize(
    ("core_of", "expected"),
    [
        ({0: 0, 1: 1}, [0, 1]),
        ({0: 0, 1: 0}, [0]),
        ({0: 0, 1: 0, 2: 1, 3: 1}, [0, 2]),  # neighbours share a core
        ({0: 0, 1: 1, 2: 0, 3: 1}, [0, 1]),  # the second half shares the cores of the first
        ({0: 0, 1: 1, 2: 2, 3: 3}, [0, 1, 2, 3]),
        ({4: 0, 7: 0, 9: 1}, [4, 9]),
    ],
)
def test_cpus_that_share_a_core_count_once(core_of, expected):
    measure_work, _ = machine(core_of)
    assert without_idle_halves(sorted(core_of), measure_work) == expected


def test_one_cpu_is_not_measured():
    measure_work, asked = machine({3: 0})
    assert without_idle_halves([3], measure_work) == [3] and not asked


@pytest.mark.parametrize(("work", "expected"), [(1.6, [0, 1]), (1.1, [0])])
def test_the_quota_limits_what_is_left(monkeypatch, work, expected):
    monkeypatch.setattr(threads, "usable_cpus", lambda: [0, 1])
    monkeypatch.setattr(threads, "physical_cpus", lambda cpus: cpus)
    for quota, limit in ((None, 2), (2.5, 2), (1.5, 1), (0.3, 1)):
        monkeypatch.setattr(cgroup, "cpu_quota", lambda quota=quota: quota)
        assert choose_cpus(None, lambda cpus: work if len(cpus) == 2 else 1.0) == expected[:limit]


def test_a_number_that_is_asked_for_is_not_checked(monkeypatch):
    monkeypatch.setattr(threads, "usable_cpus", lambda: [0, 1])
    assert choose_cpus(3, lambda cpus: 1 / 0) == [0, 1, 0]


def test_work_is_measured():
    native = isa.load(isa.available()[0])
    assert native.measure_work(native.ThreadPool(1)) > 0
