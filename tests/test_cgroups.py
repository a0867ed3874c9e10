"""Control groups' limits, read from folders like those of the system."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.base.cgroups import MemoryLimit, cpu_quota, memory_limits

NO_LIMIT = "9223372036854771712"  # version 1


def _system(tmp_path: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """The arguments for a system with these files of groups, and these groups of the process."""
    root, listed = tmp_path / "cgroup", tmp_path / "own"
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    listed.write_text(own)
    return root, listed


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "200000 100000"}, 2),  # a container sees its own group as the root
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000"}, 0.5),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "800000 100000"}, 1.5),
        (
            "0::/a\n",
            {"a/b/cpu.max": "50000 100000", "c/cpu.max": "50000 100000"},
            None,
        ),  # other groups
        ("0::/a\n", {"unified/a/cpu.max": "50000 100000"}, 0.5),
        ("0::/a\n", {"a/cpu.max": "damaged"}, None),
        ("0::/gone\n", {"cpu.max": "300000 100000"}, 3),
        (
            "3:cpu,cpuacct:/a\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000", "cpu,cpuacct/a/cpu.cfs_period_us": "20000"},
            2.5,
        ),
        (
            "1:cpu:/a\n0::/\n",
            {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"},
            None,
        ),
        (
            "1:cpu:/docker/x\n",
            {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"},
            1,
        ),
        (
            "1:cpuset:/a\n",
            {"cpuset/a/cpu.cfs_quota_us": "50000", "cpuset/a/cpu.cfs_period_us": "100000"},
            None,
        ),
        ("nonsense\n", {"cpu.max": "200000 100000"}, None),
    ],
)
def test_the_cpu_quota_is_the_smallest_of_the_groups_of_the_process(
    own: str, files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    assert cpu_quota(*_system(tmp_path, own, files)) == expected


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/a\n", {"a/memory.max": "max", "a/memory.high": "max", "a/memory.current": "5"}, []),
        (
            "0::/a\n",
            {
                "a/memory.max": "900",
                "a/memory.current": "500",
                "a/memory.stat": "anon 1\ninactive_file 200",
            },
            [MemoryLimit(900, 300)],
        ),
        (
            "0::/a\n",
            {"a/memory.max": "900", "a/memory.high": "700", "a/memory.current": "5"},
            [MemoryLimit(700, 5)],
        ),
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": "900",
                "a/b/memory.current": "1",
                "a/memory.max": "800",
                "a/memory.current": "2",
            },
            [MemoryLimit(900, 1), MemoryLimit(800, 2)],
        ),
        ("0::/a\n", {"a/memory.max": "900"}, [MemoryLimit(900, 0)]),
        (
            "4:memory:/a\n0::/\n",
            {
                "memory/a/memory.limit_in_bytes": "900",
                "memory/a/memory.usage_in_bytes": "500",
                "memory/a/memory.stat": "inactive_file 1\ntotal_inactive_file 200",
            },
            [MemoryLimit(900, 300)],
        ),
        (
            "4:memory:/docker/x\n",
            {"memory/memory.limit_in_bytes": NO_LIMIT},
            [MemoryLimit(int(NO_LIMIT), 0)],
        ),
        ("", {"memory.max": "900"}, []),
    ],
)
def test_the_memory_of_each_group_is_limited(
    own: str, files: dict[str, str], expected: list[MemoryLimit], tmp_path: Path
) -> None:
    assert memory_limits(*_system(tmp_path, own, files)) == expected


def test_files_that_cannot_be_read_limit_nothing(tmp_path: Path) -> None:
    root, own = _system(tmp_path, "0::/a\n", {"a/memory.max": "900", "a/cpu.max": "100000 100000"})
    assert (cpu_quota(root, own), len(memory_limits(root, own))) == (1, 1)
    for name in ("memory.max", "cpu.max"):
        (root / "a" / name).unlink()
        (root / "a" / name).mkdir()  # also for root, who can read any file
    assert (cpu_quota(root, own), memory_limits(root, own)) == (None, [])
    assert (cpu_quota(root, tmp_path / "none"), memory_limits(root, tmp_path / "none")) == (
        None,
        [],
    )
