"""What control groups allow this process: memory and CPU time, by the group that it is in and by all above that one.

A container sees its own group as the root; a systemd unit, or a job of a batch system, is some levels below it. Version
2 has one tree of groups, version 1 one for each controller. Owns the files and what they say; what follows is
threads.py's and runtime/memory.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")  # lines `number:controllers:/path`; that of version 2 names no controllers
_UNLIMITED = 2**60  # version 1 has no word for it, but a number near 2^63


class MemoryLimit(NamedTuple):
    """In bytes. `num_free`: of `limit`, what is not in use. A group counts the file pages that it has read (a
    downloaded checkpoint, say) as used; the kernel takes those back before it refuses memory to anybody."""

    limit: int
    num_free: int


def cpu_quota() -> float | None:
    """The least quota, in CPUs; None: there is none."""
    quotas = []
    for folder in _groups(""):
        try:
            quota, period = map(int, _read(folder, "cpu.max").split())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        quotas.append(quota / period)
    for folder in _groups("cpu"):
        try:
            quota, period = int(_read(folder, "cpu.cfs_quota_us")), int(_read(folder, "cpu.cfs_period_us"))
        except (OSError, ValueError):
            continue
        if quota > 0:  # -1: no limit
            quotas.append(quota / period)
    return min(quotas, default=None)


def memory_limits() -> list[MemoryLimit]:
    """Of each group that has one."""
    limits = []
    for controller, limit_file, used_file, prefix in (
        ("", "memory.max", "memory.current", ""),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        for folder in _groups(controller):
            try:
                limit, used = int(_read(folder, limit_file)), int(_read(folder, used_file))
                pages = dict(line.split() for line in _read(folder, "memory.stat").splitlines())
                files = int(pages[f"{prefix}inactive_file"]) + int(pages[f"{prefix}active_file"])
            except (OSError, ValueError, KeyError):  # no such file or line, or "max"
                continue
            if limit < _UNLIMITED:
                limits.append(MemoryLimit(limit, max(0, limit - used + files)))
    return limits


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's groups of version 1, from its own up to the root; `controller` "": of version 2."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        lines = []
    path = "/"
    for line in lines:
        _, controllers, its_path = line.split(":", 2)
        if controller in controllers.split(","):
            path = its_path
    # In a container, the path may be that outside: then only the root is there.
    own = ROOT / controller / path.strip("/")
    yield own
    yield from own.parents[: len(Path(path).parts) - 1]


def _read(folder: Path, name: str) -> str:
    return (folder / name).read_text()
