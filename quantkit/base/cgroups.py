"""The limits of control groups (cgroups, version 1 or 2) on this process: CPU quota and memory.

A container's limits are those of its group. The limits of a group apply to all groups in it.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """Return the processors whose time this process may use, such as 0.5; None without a limit.

    Args:
        root: where groups are mounted.
        own: the file that lists the groups of this process.
    """
    quotas = []
    for group in _iter_group_folders("cpu", root, groups_file):
        words = _read(group / "cpu.max").split()
        words = words or [
            _read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]
        # "max" and -1 are no limit.
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            quota, period = map(int, words)
            quotas.append(quota / period)
    return min(quotas, default=None)


def memory_limits(root: Path = _ROOT, groups_file: Path = _OWN) -> list[MemoryLimit]:
    """Return the groups that limit this process's memory; arguments as for `cpu_quota`."""
    result = []
    for group in _iter_group_folders("memory", root, groups_file):
        limits, used = (
            [
                int(text)
                for name in names
                if (text := _read(group / f"memory.{name}").strip()).isdecimal()
            ]
            for names in (("max", "high", "limit_in_bytes"), ("current", "usage_in_bytes"))
        )
        if limits:
            cache = read_numbers(group / "memory.stat")
            # Of version 1, or 2.
            freed = cache.get("total_inactive_file", cache.get("inactive_file", 0))
            result.append(MemoryLimit(min(limits), max(0, sum(used) - freed)))
    return result


def read_numbers(path: Path) -> dict[str, int]:
    """Return the lines of a system file that begin with a name and a number; none if it cannot
    be read.
    """
    lines = [line.replace(":", " ").split() for line in _read(path).splitlines()]
    numbers: dict[str, int] = {}
    for line in lines:
        if len(line) > 1 and line[1].isdecimal():
            numbers[line[0]] = int(line[1])
    return numbers


def _iter_group_folders(controller: str, root: Path, groups_file: Path) -> Iterator[Path]:
    """Folders where this process's groups may be: of the innermost group first.

    In a container the outermost folder can be the container's own group, whatever path is listed.
    """
    for _, names, path in (
        line.split(":", 2) for line in _read(groups_file).splitlines() if line.count(":") > 1
    ):
        if not names:  # version 2
            mounts = {root, root / "unified"}
        elif controller in names.split(","):
            mounts = {root / controller, root / names}
        else:
            continue
        for mount in mounts:
            inner = mount / path.strip("/")
            yield from (
                folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount)
            )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
