"""Limits of control groups, in made-up trees of both versions: the process's own group counts, and all above it."""

from __future__ import annotations

import pytest

from octavo.ops import cgroup


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Writes a tree: `membership` is /proc/self/cgroup, `files` go below /sys/fs/cgroup."""

    def make(membership: str | None, files: dict[str, str]) -> None:
        root, own = tmp_path / "cgroup", tmp_path / "self"
        monkeypatch.setattr(cgroup, "ROOT", root)
        monkeypatch.setattr(cgroup, "MEMBERSHIP", own)
        if membership is not None:
            own.write_text(membership)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)

    return make


def memory(folder: str, limit: object, used: int, version: int = 2) -> dict[str, str]:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    prefix = "" if version == 2 else "total_"
    stat = f"anon 1\n{prefix}inactive_file 300000\n{prefix}active_file 200000\n"
    return {f"{folder}{names[0]}": f"{limit}\n", f"{folder}{names[1]}": f"{used}\n", f"{folder}memory.stat": stat}


def test_files_that_a_group_has_read_do_not_count_as_used(groups):
    groups("0::/\n", memory("", 1000000, 900000))
    assert cgroup.memory_limits() == [(1000000, 600000)]


def test_a_unit_below_a_slice(groups):
    """The root of a machine's tree has no limits; here the unit has one, and so has its slice."""
    files = memory("system.slice/octavo.service/", 4000000, 600000) | memory("system.slice/", 3000000, 2900000)
    files |= {"system.slice/octavo.service/cpu.max": "150000 100000\n", "system.slice/cpu.max": "max 100000\n"}
    groups("0::/system.slice/octavo.service\n", files)
    assert cgroup.memory_limits() == [(4000000, 3900000), (3000000, 600000)]
    assert cgroup.cpu_quota() == 1.5


def test_no_limit(groups):
    groups("0::/a\n", memory("a/", "max", 5) | {"a/cpu.max": "max 100000\n"})
    assert cgroup.memory_limits() == [] and cgroup.cpu_quota() is None


@pytest.mark.parametrize(
    "membership", ["7:cpu,cpuacct:/job\n4:memory:/job\n0::/\n", "7:cpuacct,cpu:/job/2\n4:memory:/job/2\n"]
)
def test_version_1_has_a_tree_for_each_controller(groups, membership):
    files = memory("memory/", 2**63 - 4096, 5, 1) | memory("memory/job/", 1000000, 900000, 1)
    files |= {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    files |= {"cpu/job/cpu.cfs_quota_us": "50000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}
    groups(membership, files)
    assert cgroup.memory_limits() == [(1000000, 600000)]
    assert cgroup.cpu_quota() == 0.5


@pytest.mark.parametrize("membership", ["0::/docker/1f\n5:memory:/docker/1f\n", None])
def test_a_container_that_sees_the_path_outside(groups, membership):
    groups(membership, memory("memory/", 1000000, 900000, 1) | {"cpu.max": "200000 100000\n"})
    assert cgroup.memory_limits() == [(1000000, 600000)]
    assert cgroup.cpu_quota() == 2


def test_this_process():
    assert all(0 <= group.num_free <= 2 * group.limit for group in cgroup.memory_limits())
    quota = cgroup.cpu_quota()
    assert quota is None or quota > 0
