"""Batches that stop at the same places, and files for what they hold meanwhile."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from error_parts import raises
from torch import Tensor, nn

from quantkit.errors import DestinationError, NoSpaceError, UnsupportedError
from quantkit.passes import activation_store as store_module
from quantkit.passes.activation_store import ActivationStore, _Saved
from quantkit.passes.lockstep import Lockstep, stop
from quantkit.passes.model_storages import ModelStorages

_BYTES = 4000  # of what each batch holds below
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.complex64,
)


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _hold(store: ActivationStore, batch: int, *tensors: Tensor) -> None:
    store.hold_batch(
        batch, {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors}, (), set
    )


@pytest.mark.parametrize("piece", [1 << 24, 24])
def test_what_was_in_files_returns_byte_for_byte(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_PIECE", piece)
    folder = tmp_path / "spill"
    store = ActivationStore(folder)
    base = torch.randn(7, 5)
    view, viewed = base[2:5].t(), base[2:5].t().clone()
    batches = [
        [torch.randint(2, (n,)).to(dtype) for dtype in DTYPES for n in (1, 3, 1001, 0)]
        for _ in range(2)
    ]
    batches[0] += [base, view]
    expected = [[_bytes(tensor).clone() for tensor in tensors] for tensors in batches]
    for index, tensors in enumerate(batches):
        _hold(store, index, *tensors)
        assert not any(map(len, map(_bytes, tensors)))
    total = sum(len(one) for own in expected for one in own) - base.nbytes  # which a view shares
    assert sum(path.stat().st_size for path in folder.iterdir()) == store.spilled_bytes == total
    for index in (1, 0):
        store.resume_batch(index)
        assert all(map(torch.equal, map(_bytes, batches[index]), expected[index]))
    assert torch.equal(view, viewed)
    files = sorted(folder.iterdir())
    _hold(store, 0, *batches[0])  # nothing has changed
    assert sorted(folder.iterdir()) == files
    assert store.written_bytes == total
    store.resume_batch(0)
    del tensors, batches
    _hold(store, 0, base)
    assert len(list(folder.iterdir())) == 1
    store.close()
    assert not list(tmp_path.iterdir())


def test_copies_of_batches_that_did_not_run_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ActivationStore(tmp_path / "spill")
    checked = list[_Saved]()
    is_gone: Any = vars(_Saved)["is_gone"]

    def watch(saved: _Saved) -> bool:
        checked.append(saved)
        return bool(is_gone.fget(saved))

    monkeypatch.setattr(_Saved, "is_gone", property(watch))
    batches = [[torch.ones(10) for _ in range(3)] for _ in range(8)]
    for index, tensors in enumerate(batches):
        _hold(store, index, *tensors)
    checked.clear()
    store.resume_batch(5)
    _hold(store, 5, *batches[5])
    assert len(checked) == 3
    store.release_batches()


def test_what_a_batch_writes_to_a_tensor_of_another_one_is_written_again(tmp_path: Path) -> None:
    store = ActivationStore(tmp_path / "spill")
    shared = torch.ones(10)
    _hold(store, 0, shared)
    store.resume_batch(0)
    shared.add_(1)
    storage = shared.untyped_storage()
    # The second batch has the same tensor, and wrote to it; the first did not run meanwhile.
    store.hold_batch(1, {storage._cdata: storage}, {storage._cdata}, set)
    store.resume_batch(1)
    _hold(store, 0, shared)
    store.resume_batch(0)
    assert shared.eq(2).all()
    store.release_batches()


def test_batches_tensors_and_reserved_memory_share_one_budget(tmp_path: Path) -> None:
    store = ActivationStore(tmp_path / "spill", 10_000)
    held, other = torch.ones(1000), torch.ones(1000)
    store.reserve("sums", 1000)
    store.put("first", torch.ones(1000))
    _hold(store, 0, held)
    assert store.spilled_bytes == 0
    # Neither a tensor nor a batch has room now.
    store.put("second", torch.ones(1000))
    assert store.file_bytes == 4000
    _hold(store, 1, other)
    assert store.file_bytes == 8000
    assert len(_bytes(held)) == held.nbytes
    assert not len(_bytes(other))
    store.resume_batch(0)
    assert store.has_room(4000)
    store.resume_batch(1)
    assert other.eq(1).all()
    store.reserve("sums", 6000)
    assert not store.has_room(4000)
    store.close()


def test_a_folder_that_is_there_is_not_written_to_and_not_removed(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("kept")
    store = ActivationStore(tmp_path)
    held = torch.ones(9)
    with raises(DestinationError, path=tmp_path):
        _hold(store, 0, held)
    store.close()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]
    assert held.eq(1).all()


@pytest.mark.parametrize("count", [5, 10**6])
def test_a_full_disk_is_reported_however_little_is_left_to_write(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = builtins.open
    monkeypatch.setattr(
        store_module, "open", lambda _, mode: real("/dev/full", mode), raising=False
    )
    store = ActivationStore(tmp_path / "spill")
    held = torch.ones(count)
    with raises(NoSpaceError, options=["activation_memory", "resume"]):
        _hold(store, 0, held)
    assert held.eq(1).all()
    store.close()
    assert not list(tmp_path.iterdir())


class _Model(nn.Module):
    """Its batches hold views of its tensors, and `_BYTES` that are theirs."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 10), requires_grad=False)
        self.register_buffer("table", torch.randn(10))
        self.attribute = torch.randn(10)

    def forward(
        self, inputs: Tensor, seen: Callable[[Tensor], object] = id, *, stops: bool = True
    ) -> Tensor:
        weight, table, attribute = self.weight.t(), self.table[:], self.attribute[:]
        seen(made := inputs + 1)
        for key in "ab":
            if stops:
                stop(key, made)
            seen(made := (made.view(-1, 10) @ weight + table * attribute).flatten())
        return made


@pytest.mark.parametrize("budget", [0, 2 * _BYTES + 1000, 10**6])
def test_memory_stays_within_the_budget_and_the_models_own_tensors_stay(
    budget: int, tmp_path: Path
) -> None:
    model, batches, made = _Model(), [torch.randn(1000) for _ in range(5)], dict[int, Tensor]()
    found = list[Tensor]()
    store = ActivationStore(tmp_path / "spill", budget)
    forwards = [
        lambda index=index, one=one: found.append(
            model(one, lambda value: made.update({index: value}))
        )
        for index, one in enumerate(batches)
    ]

    def before(index: int) -> None:
        assert all(
            len(_bytes(one)) == one.nbytes for one in (model.weight, model.table, model.attribute)
        )

    for _ in Lockstep(
        forwards, ModelStorages(model, lambda name: None, ()).collect, store
    ).iterate_rounds(lambda index, key, value: None, before):
        assert (
            sum(len(_bytes(value)) for value in made.values()) == min(budget // _BYTES, 5) * _BYTES
        )
    assert all(
        torch.equal(one, model(inputs, stops=False))
        for one, inputs in zip(found, batches, strict=True)
    )
    assert store.peak_bytes <= budget
    assert (store.spilled_bytes == 0) == (budget > 5 * _BYTES)
    store.close()
    assert not list(tmp_path.iterdir())


def test_what_a_batch_changes_in_place_is_written_again(tmp_path: Path) -> None:
    store = ActivationStore(tmp_path / "spill")
    found = list[float]()

    def forward() -> None:
        states, kept = torch.zeros(1000), torch.ones(1000)
        sums, total = states.view(10, 100), torch.empty(1000)
        for number in range(3):
            stop(number)
            sums[number] += 1
            torch.add(states, kept, out=total)
            dropped = torch.full((1000,), number)  # in memory that another one may have had
            stop(f"and {number}")
            assert dropped.eq(number).all()
            del dropped
        found.append(float(total.sum()))

    list(Lockstep([forward, forward], set, store).iterate_rounds(lambda *_: None))
    assert found == [1300.0] * 2
    each, changed = 4000, 3 * 2 * 4000
    assert store.written_bytes == 2 * (each * 3 + changed + 3 * 8000)


def _walk(*keys: str, log: list[Any], index: int = 0) -> Callable[[], None]:
    def forward() -> None:
        try:
            for key in keys:
                log.append((index, "reaches", key))
                if key == "error":
                    raise ValueError(key)
                stop(key, (index, key))
        finally:
            log.append((index, "ends"))

    return forward


def test_all_batches_arrive_before_the_first_goes_on() -> None:
    log, expected = list[Any](), list[Any]()
    lockstep = Lockstep(
        [_walk(*"ab", log=log, index=index) for index in range(3)], set, ActivationStore()
    )
    for place in lockstep.iterate_rounds(
        lambda *arrived: log.append(arrived), lambda index: log.append((index, "before"))
    ):
        log.append(place)
    for key in "ab":
        for index in range(3):
            expected += [(index, "before"), (index, "reaches", key), (index, key, (index, key))]
        expected.append(key)
    assert log == expected + [
        one for index in range(3) for one in ((index, "before"), (index, "ends"))
    ]


@pytest.mark.parametrize(
    ("other", "places"), [("ac", "b and c"), ("a", "b and the end"), ("abc", "the end and c")]
)
def test_batches_that_take_other_ways_are_refused_and_end(other: str, places: str) -> None:
    log = list[Any]()
    forwards = [_walk(*way, log=log, index=index) for index, way in enumerate(("ab", other, "ab"))]
    with raises(UnsupportedError, found=places) as caught:
        list(Lockstep(forwards, set, ActivationStore()).iterate_rounds(lambda *_: None))
    assert caught.value.exit_code == 4
    assert {index for index, what, *_ in log if what == "ends"} == {0, 1, 2}


@pytest.mark.parametrize("failing", [False, True])
def test_batches_end_where_they_are_when_one_fails_or_nobody_goes_on(
    failing: bool, tmp_path: Path
) -> None:
    store = ActivationStore(tmp_path / "spill")
    log = list[Any]()
    forwards = [_walk("a", "error" if failing else "b", log=log, index=index) for index in range(3)]
    rounds = Lockstep(forwards, set, store).iterate_rounds(lambda *_: None)
    assert next(rounds) == "a"
    _hold(store, 7, torch.ones(3))
    if failing:
        with pytest.raises(ValueError, match="error"):
            next(rounds)
    rounds.close()
    assert log[3 + failing :] == [(index, "ends") for index in range(3)]
    store.close()
    assert not list(tmp_path.iterdir())


def test_batches_that_need_not_wait_run_ahead() -> None:
    events: list[tuple[str, int, Any]] = []

    def forward(index: int) -> Callable[[], None]:
        def run() -> None:
            for place in range(3):
                held = torch.full((4,), float(place))
                stop(place, held)
                events.append(("went on from", index, place))

        return run

    rounds = Lockstep([forward(0), forward(1)], set, ActivationStore()).iterate_rounds(
        lambda index, place, value: events.append(("showed", index, float(value[0]))),
        runs_ahead=lambda index, place: index == 1 and place < 2,
    )
    places = []
    for place in rounds:
        places.append(place)
        events.append(("all at", -1, place))
    assert places == [0, 1, 2]
    first = ["showed 0 0.0", "showed 1 0.0", "went on from 1 0", "all at -1 0"]
    second = ["went on from 0 0", "showed 0 1.0", "showed 1 1.0", "went on from 1 1", "all at -1 1"]
    assert [" ".join(map(str, event)) for event in events[:9]] == first + second
