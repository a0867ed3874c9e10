"""The processes of a job: what each has of it, and what they tell each other."""

from __future__ import annotations

import json

import forked
import pytest
import torch

from quantkit.distributed.group import SINGLE, ProcessGroup, join_processes

TALK = """
import json, sys, torch
from quantkit.distributed.group import join_processes
from quantkit.errors import GroupError
with join_processes("cpu") as group:
    rows = torch.arange(10.0).view(5, 2)
    total = torch.tensor([1.0, group.rank])
    group.sum_(total)
    group.wait()
    group.require_same({"alike": 1})
    try:
        group.require_same({"alike": 1, "odd": group.rank})
    except GroupError as error:
        problem = str(error)
    said = group.broadcast_from_rank0(f"from {group.rank}")
    told = [total.tolist(), group.join(rows[group.share(5)], 5).tolist(), said, problem]
    print(json.dumps(told))
"""


@pytest.mark.slow
def test_processes_add_up_join_and_agree() -> None:
    done = forked.group(3, TALK)
    assert [process.returncode for process in done] == [0] * 3, done[0].stderr
    total, rows, said, problem = json.loads(done[0].stdout)
    assert total == [3, 0 + 1 + 2]
    assert rows == torch.arange(10.0).view(5, 2).tolist()
    assert said == "from 0"
    assert "odd (found 1 in process 1, expected 0 as in process 0)" in problem
    assert {process.stdout for process in done} == {done[0].stdout}


def test_a_single_process_needs_no_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_processes("cpu") as group:
        assert group is SINGLE
    assert (SINGLE.rank, SINGLE.size, SINGLE.is_rank0, SINGLE.device) == (0, 1, True, None)
    assert not torch.distributed.is_initialized()
    value = torch.ones(3)
    SINGLE.sum_(value)
    assert value.tolist() == [1, 1, 1]
    assert SINGLE.join(value, 3) is value
    assert SINGLE.broadcast_from_rank0(value) is value
    assert SINGLE.is_first_to_fail()
    SINGLE.wait()
    SINGLE.require_same({"anything": 1})
    SINGLE.announce_exit(1)


def test_shares_are_whole_and_apart() -> None:
    assert SINGLE.share(20) == slice(0, 20)
    for size in (1, 2, 3, 7):
        found = [
            index for rank in range(size) for index in range(20)[ProcessGroup(rank, size).share(20)]
        ]
        assert found == list(range(20))
