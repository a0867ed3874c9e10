"""Greedy decoding by a recorded step: here the recorder only runs the step again, and tokens
reach the host late.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from architecture_cases import CASES, ROPES
from rows import Late, LateRecorder, together
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import quantkit
from quantkit.errors import NonFiniteError, RequestError
from quantkit.formats.detect import open_checkpoint
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Decoder
from quantkit.model.device import copy_integers
from quantkit.model.load import load_model, meta_init
from quantkit.runtime import captured
from quantkit.runtime import engine as engine_module
from quantkit.runtime.captured import (
    DECODE_SETTING,
    EagerRecorder,
    GraphRecorder,
    choose_decode_kind,
    greedy_step,
)
from quantkit.runtime.engine import Engine, bucket
from quantkit.runtime.generation import Generation
from quantkit.runtime.request import Request
from quantkit.runtime.sampling_params import SamplingParams
from quantkit.runtime.scheduler import READ_LAG, Scheduler

CONTEXT = 128


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("captured")
    for name, changes in {
        "model": {},
        "dynamic": {"rope_parameters": dict(ROPES["dynamic"])},
    }.items():
        made = oracle.make(
            "llama", max_position_embeddings=64 if name == "dynamic" else CONTEXT, **changes
        )
        quantkit.quantize(
            oracle.save(made, base / name), base / f"{name}-int8", "int8", accept_quality_loss=True
        )
    return base


def _model(folder: Path, ends: tuple[int, ...] = ()) -> Decoder:
    model = load_model(folder, device="cpu", dtype=torch.float32)
    model.config = replace(model.config, eos_token_ids=ends)
    return model


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> LateRecorder:
    found = LateRecorder()
    monkeypatch.setattr(engine_module, "EagerRecorder", lambda: found)
    monkeypatch.setenv(DECODE_SETTING, "eager")
    return found


def _prompts(count: int, dice: random.Random) -> list[list[int]]:
    """Of some lengths; some begin as others do."""
    texts = oracle.random_tokens(60, batch=4)
    return [
        texts[dice.randrange(4), : dice.choice((1, 2, 5, 17, 33, 40))].tolist()
        for _ in range(count)
    ]


def _mixed(dice: random.Random) -> list[Request]:
    """Mostly greedy ones, among others that need their logits on the host."""
    found = []
    for prompt in _prompts(12, dice):
        count, kind = dice.choice((1, 2, 3, 9, 20, CONTEXT - len(prompt))), dice.randrange(8)
        if kind == 0:
            found.append(
                Request(
                    prompt,
                    count,
                    SamplingParams(temperature=1.0, seed=dice.randrange(9)),
                    samples=2,
                )
            )
        elif kind == 1:
            found.append(Request(prompt, count, logprobs=1, echo=dice.random() < 0.5))
        elif kind == 2:
            found.append(Request(prompt, count, SamplingParams(repetition_penalty=1.3)))
        else:
            found.append(Request(prompt, count, samples=dice.choice((1, 1, 3))))
    return found


def _run(engine: Engine, requests: list[Request], dice: random.Random) -> list[Generation]:
    """What comes of requests that are added while others run, one of which somebody ends."""
    scheduler, waiting, found = Scheduler(engine), list(requests), list[Generation]()
    while waiting or scheduler.busy:
        if waiting and (not scheduler.busy or dice.random() < 0.3):
            found += scheduler.add(waiting.pop(0))
        for one in scheduler.step():
            if one.request is requests[3] and len(one.tokens) >= 2:
                scheduler.end(one)
                del one.tokens[2:]  # more may have come at once
    return found


def _bare(one: Generation) -> tuple[list[int], str | None]:
    return one.tokens, one.finish_reason


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("slots", [1, 3, 5])
@pytest.mark.parametrize("soon", [0.0, 0.5, 1.0], ids=["late", "now and then", "at once"])
@pytest.mark.parametrize("folder", ["model", "model-int8"])
def test_tokens_are_those_of_steps_one_by_one(
    folder: str,
    soon: float,
    slots: int,
    folders: Path,
    recorder: LateRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder.soon = soon
    ends = (7, 20, 33, 51)
    requests = _mixed(random.Random(slots))
    engine = Engine(_model(folders / folder, ends), CONTEXT, slots=slots)
    found = _run(engine, requests, random.Random(7))
    assert (
        max(recorder.behind) <= READ_LAG + slots
    )  # each slot may get a first token in the same step
    assert max(recorder.behind) <= slots if soon == 1.0 else max(recorder.behind) >= READ_LAG
    monkeypatch.setenv(DECODE_SETTING, "steps")
    monkeypatch.setattr(engine_module, "EagerRecorder", EagerRecorder)
    expected = _run(
        Engine(_model(folders / folder, ends), CONTEXT, slots=slots), requests, random.Random(8)
    )
    assert [_bare(one) for one in found] == [_bare(one) for one in expected]
    assert {one.finish_reason for one in expected} == {"stop", "length"}
    for one, other in zip(found, expected, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if (
            one.logprobs is not None and other.logprobs is not None
        ):  # products of other sizes may round otherwise
            assert one.logprobs.tokens == pytest.approx(other.logprobs.tokens, abs=1e-5)
            assert [*map(set, one.logprobs.top)] == [*map(set, other.logprobs.top)]
    assert recorder.steps > 50
    assert 0 < recorder.recorded <= len({bucket(count, 1) for count in range(1, slots + 1)})


@pytest.mark.slow
def test_rotary_positions_follow_the_length(folders: Path, recorder: LateRecorder) -> None:
    """Beyond the original context, where each row has frequencies of its own."""
    requests = [Request(prompt, 80, logprobs=None) for prompt in _prompts(3, random.Random(3))]
    for name in ("dynamic", "dynamic-int8"):
        model = _model(folders / name)
        assert model.config.follows_length
        found = [one.token_ids for one in together(Engine(model, CONTEXT, slots=2), requests)]
        assert recorder.steps >= 80
        reported = [replace(request, logprobs=0) for request in requests]
        assert found == [
            one.token_ids for one in together(Engine(model, CONTEXT, slots=2), reported)
        ]


def test_the_host_gives_positions_only_where_others_go_on(
    folders: Path, recorder: LateRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    def noted(values: list[int], device: torch.device) -> Tensor:
        given.append(len(values))
        return copy_integers(values, device)

    monkeypatch.setattr(captured, "copy_integers", noted)
    engine = Engine(_model(folders / "model-int8"), CONTEXT, slots=3)
    prompts = oracle.random_tokens(5, batch=3).tolist()
    together(engine, [Request(prompt, 30) for prompt in prompts])
    # Three end at once: recorded for four rows, and then given once.
    assert given == [12, 12]
    together(engine, [Request(prompts[0], 30), Request(prompts[1], 60)])
    assert given == [12, 12, 6, 6, 3, 3]
    assert recorder.recorded == 3
    assert engine.warm_up() == 3
    assert recorder.recorded == 3


@pytest.mark.parametrize("wrong", ["raises", "stands still", "is empty", "is another"])
def test_what_cannot_be_recorded_runs_step_by_step(
    wrong: str, folders: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(EagerRecorder):
        def record(self, step: Callable[[], None]) -> Callable[[], None]:
            if wrong == "raises":
                raise RuntimeError("operation not permitted when stream is capturing")
            if wrong in ("stands still", "is empty"):
                if wrong == "stands still":
                    step()
                return lambda: None
            return lambda: (step(), step())  # type: ignore[return-value]

    monkeypatch.setattr(engine_module, "EagerRecorder", Wrong)
    model, prompt = _model(folders / "model-int8"), oracle.random_tokens(9)[0].tolist()
    if wrong == "is empty":  # and the token is what nobody has written anything over
        monkeypatch.setattr(
            model, "head", lambda hidden: hidden.new_zeros(len(hidden), model.config.vocab_size)
        )
    expected = list(quantkit.generate(model, prompt, max_new_tokens=12))
    monkeypatch.setenv(DECODE_SETTING, "eager")
    engine = Engine(model, 40)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert list(quantkit.generate(engine, prompt, max_new_tokens=12)) == expected
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "decoding steps cannot be captured here"
    ]


def test_what_is_not_finite_is_never_given_out(
    folders: Path, recorder: LateRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(folders / "model-int8")
    prompt = oracle.random_tokens(9)[0].tolist()
    expected = list(quantkit.generate(model, prompt, max_new_tokens=20))
    engine = Engine(model, 40, slots=2)
    engine.warm_up()
    head, calls = model.head, iter(range(100))
    monkeypatch.setattr(
        model, "head", lambda hidden: head(hidden) * (torch.nan if next(calls) == 4 else 1)
    )
    given: list[int] = []
    with pytest.raises(NonFiniteError, match="the model's logits are NaN or Inf"):
        given.extend(quantkit.generate(engine, prompt, max_new_tokens=20))
    assert given == expected[: len(given)]
    assert len(given) <= 4


def test_of_what_lies_beyond_an_end_nothing_is_requested(
    folders: Path, recorder: LateRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor whether it is finite."""
    model = _model(folders / "model-int8")
    prompt = oracle.random_tokens(9)[0].tolist()
    expected = list(quantkit.generate(model, prompt, max_new_tokens=20))
    at = next(at for at, token in enumerate(expected) if at > 2 and token not in expected[:at])
    model.config = replace(model.config, eos_token_ids=(expected[at],))
    engine = Engine(model, 40)
    engine.warm_up()
    head, calls = model.head, iter(range(100))
    monkeypatch.setattr(
        model, "head", lambda hidden: head(hidden) * (torch.nan if next(calls) > at else 1)
    )
    before = recorder.steps
    assert list(quantkit.generate(engine, prompt, max_new_tokens=20)) == expected[:at]
    assert recorder.steps - before == 1 + at + READ_LAG  # the first token follows the prompt


def test_a_step_that_is_broken_off_spoils_nothing(
    folders: Path, recorder: LateRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(_model(folders / "model-int8"), 60)
    prompt = oracle.random_tokens(9)[0].tolist()
    expected = list(quantkit.generate(engine, prompt, max_new_tokens=20))

    fetch, calls = recorder.fetch, itertools.count()

    def broken(tokens: Tensor) -> Late:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return fetch(tokens)

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "fetch", broken)
        with pytest.raises(KeyboardInterrupt):
            list(quantkit.generate(engine, prompt, max_new_tokens=20))
    assert list(quantkit.generate(engine, prompt, max_new_tokens=20)) == expected


def test_the_setting_says_how(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.delenv(DECODE_SETTING, raising=False)
    assert [
        choose_decode_kind(readme, True),
        choose_decode_kind(readme, False),
        choose_decode_kind(cpu, True),
    ] == [
        "compiled",
        "steps",
        "steps",
    ]
    for kind in ("compiled", "eager", "steps"):
        monkeypatch.setenv(DECODE_SETTING, kind)
        assert [
            choose_decode_kind(readme, True),
            choose_decode_kind(readme, False),
            choose_decode_kind(cpu, False),
        ] == [
            kind,
            "steps",
            kind,
        ]
    monkeypatch.setenv(DECODE_SETTING, "fast")
    with pytest.raises(
        RequestError, match=r"QUANTKIT_DECODE .*\(found fast, expected compiled, eager, steps\)"
    ):
        Engine(_model(folders / "model"), 20)


# On a card that is not there


class Driver:
    """Notes what CUDA is asked for, in place of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: Any = Stream(self, "default")
        self.done: list[Any] = []
        streams = itertools.count()
        for name, value in {
            "graph_pool_handle": lambda: "pool",
            "device": nullcontext,
            "CUDAGraph": SimpleNamespace,
            "Stream": lambda: Stream(self, f"stream {next(streams)}"),
            "current_stream": lambda: self.current,
            "stream": self.on,
            "graph": self.graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any = None, **options: Any) -> Iterator[None]:
        before, self.current = self.current, stream or Stream(self, "of the first card")
        graph.replay = None
        self.done.append("begin")
        yield  # torch's own goes back to the stream before it only where nothing is raised
        self.current = before


class Stream:
    def __init__(self, driver: Driver, name: str) -> None:
        self.driver, self.name = driver, name

    def wait_stream(self, other: Stream) -> None:
        self.driver.done.append(f"{self.name} waits for {other.name}")


def test_a_graph_is_recorded_where_it_was_tried_on_the_gpus_own_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch)
    recorder, default = GraphRecorder(torch.device("cuda:1")), driver.current
    tried = ["step on stream 0"] * 3
    before, after = "stream 0 waits for default", "default waits for stream 0"

    def step() -> None:
        driver.done.append(f"step on {driver.current.name}")
        if len(driver.done) == stop:
            raise RuntimeError("operation not permitted when stream is capturing")

    for stop in (0, 6, 3):
        driver.done.clear()
        with pytest.raises(RuntimeError) if stop else nullcontext():
            recorder.record(step)
        assert driver.current is default
        whole = [before, *tried, "begin", tried[0]]
        assert driver.done == [*whole[: stop or None], after]


OPERATORS = {Tensor.copy_: torch.ops.aten.copy_, Tensor.__invert__: torch.logical_not}
"""In place of functions that ask the driver, which is not there."""


class _Away(TorchFunctionMode):
    """Refuses what would take numbers of the host to a card, which waits for them and so cannot
    be recorded.
    """

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        assert "device" not in (kwargs or {}) or function is not torch.tensor, (
            "a tensor of the host's numbers"
        )
        assert function is not torch.where or all(isinstance(one, Tensor) for one in args), (
            "a number in torch.where"
        )
        if function is Tensor.__setitem__:
            places = [one if isinstance(one, Tensor) else None for one in args[1]]
            return torch.ops.aten.index_put_(args[0], places, args[2])
        function = OPERATORS.get(function, function)
        return function(*args, **(kwargs or {}))


class _Moves(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in (one for one in (*args, found) if isinstance(one, Tensor)):
            assert tensor.is_cuda or tensor.dim() == 0, f"{function} of a tensor on the host"
        return found


STEPS = ["llama-tied", "dynamic", "gemma2"]


@pytest.mark.parametrize("case", STEPS)
def test_a_step_needs_nothing_of_the_host(case: str, tmp_path: Path) -> None:
    kind, changes = CASES.get(case, ("llama", {"rope_parameters": dict(ROPES["dynamic"])}))
    config = open_checkpoint(oracle.save(oracle.make(kind, **changes), tmp_path / "model")).config
    with meta_init():
        model = Decoder(config)
    readme = torch.device("cuda")
    with FakeTensorMode(), torch.inference_mode():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    value = torch.empty(parameter.shape, dtype=torch.bfloat16, device=readme)
                    module._parameters[name] = nn.Parameter(value)
            for name, buffer in module._buffers.items():
                module._buffers[name] = (
                    None if buffer is None else torch.empty(buffer.shape, device=readme)
                )
        for slots, cached in itertools.product((1, 4), (torch.bfloat16, torch.int8)):
            cache = KVCache(config, slots, 33, cached, readme)
            rows, last, drawn = (
                torch.zeros(shape, dtype=torch.long, device=readme)
                for shape in ((3, slots), slots + 1, slots)
            )
            with _Away(), _Moves():
                greedy_step(model, rows, last, drawn, cache, slots == 1)
