"""The limits of control groups (cgroups, version 1 or 2) on this process: CPU quota and memory.

A container's limits are those of its group. The limits of a group apply to all groups in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class MemoryLimit:
    """The memory of one group.

    Attributes:
        limit: in bytes.
        used: in bytes, without file cache that the system frees when memory is short.
    """

    limit: int
    used: int


def cpu_quota(root: Path = _ROOT, groups_file: Path = _OWN) -> float | None:
    """Read how many processors' time this process may use, such as 0.5; None without a limit.

    Args:
        root: the folder in which groups are mounted.
        groups_file: the file that lists the groups of this process.
    """
    quotas: list[float] = []
    for group in _iter_group_folders("cpu", root, groups_file):
        # Version 2 has quota and period in one file, version 1 in two.
        words = _read(group / "cpu.max").split()
        if not words:
            quota_text = _read(group / "cpu.cfs_quota_us").strip()
            period_text = _read(group / "cpu.cfs_period_us").strip()
            words = [quota_text, period_text]
        # "max" and -1 are no limit.
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            quota, period = map(int, words)
            quotas.append(quota / period)
    # The limit of an outer group also applies to the groups in it.
    return min(quotas, default=None)


def memory_limits(root: Path = _ROOT, groups_file: Path = _OWN) -> list[MemoryLimit]:
    """Read the limits of the groups that limit this process's memory; arguments as for
    `cpu_quota`.
    """
    memory: list[MemoryLimit] = []
    for group in _iter_group_folders("memory", root, groups_file):
        # The files of version 2 first, then version 1's.
        limits = _read_memory_numbers(group, ("max", "high", "limit_in_bytes"))
        used = _read_memory_numbers(group, ("current", "usage_in_bytes"))
        if limits:
            cache = read_numbers(group / "memory.stat")
            # Version 1 names the sum over the group's subgroups `total_inactive_file`; in version 2
            # `inactive_file` is this sum.
            freed = cache.get("total_inactive_file", cache.get("inactive_file", 0))
            # The files are read one after the other, so the cache may exceed the memory in use.
            memory.append(MemoryLimit(min(limits), max(0, sum(used) - freed)))
    return memory


def _read_memory_numbers(group: Path, names: Iterable[str]) -> list[int]:
    """Read the numbers in a group's memory files; skip missing files and ``max``, no limit."""
    numbers: list[int] = []
    for name in names:
        text = _read(group / f"memory.{name}").strip()
        if text.isdecimal():
            numbers.append(int(text))
    return numbers


def read_numbers(path: Path) -> dict[str, int]:
    """Read the lines of a system file that begin with a name and a number; none if the file cannot
    be read.
    """
    numbers: dict[str, int] = {}
    for line in _read(path).splitlines():
        # /proc/meminfo and /proc/self/status have a colon after the name, memory.stat has none.
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdecimal():
            numbers[words[0]] = int(words[1])
    return numbers


def _iter_group_folders(controller: str, root: Path, groups_file: Path) -> Iterator[Path]:
    """Yield the folders in which this process's groups may be: of the innermost group first.

    In a container the outermost folder can be the container's own group, whatever path is listed.
    """
    for line in _read(groups_file).splitlines():
        if line.count(":") < 2:
            continue
        _, names, path = line.split(":", 2)
        # Version 2 has one hierarchy for all controllers, and lists no names.
        if not names:
            mounts = {root, root / "unified"}
        elif controller in names.split(","):
            mounts = {root / controller, root / names}
        else:
            continue
        for mount in mounts:
            inner = mount / path.strip("/")
            for folder in (inner, *inner.parents):
                if folder.is_relative_to(mount):
                    yield folder


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
