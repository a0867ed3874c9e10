"""Greedy decoding as one recorded step: from tokens to the tokens after them, and nothing from the host in between.

N rows, of one sequence each.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Decoder
from quantkit.model.device import numbers

DECODE_SETTING = "QUANTKIT_DECODE"
"""Environment variable: how a GPU decodes greedily. ``compiled`` and ``eager`` record a step from its tokens to the
next ones as one CUDA graph, of what torch.compile makes of it or of torch's operators as they are; ``steps`` records
nothing of our own. On a CPU nothing is recorded, and a step goes that way only where this says so."""

DecodeKind = Literal["compiled", "eager", "steps"]
_KINDS = ("compiled", "eager", "steps")
_WARM_UPS = 3  # of a step before it is recorded: the first compiles, and tunes what it compiles

_log = logging.getLogger(__name__)


def decode_kind(device: torch.device, compiled: bool) -> DecodeKind:
    """How an engine whose steps are compiled, or not, decodes greedily.

    Raises:
        RequestError: if the setting has another value.
    """
    setting = os.environ.get(DECODE_SETTING) or None
    if setting is not None and setting not in _KINDS:
        raise RequestError(f"{DECODE_SETTING} has a value of no meaning", found=setting, expected=", ".join(_KINDS))
    if device.type == "cuda" and not compiled:
        return "steps"
    if setting is None:
        return "compiled" if device.type == "cuda" else "steps"
    return cast(DecodeKind, setting)


class LateTokens(Protocol):
    """Tokens on their way to the host."""

    @property
    def arrived(self) -> bool:
        """Whether they can be read without waiting."""
        ...

    def read(self) -> list[int]:
        """They, or -1 in the place of each whose logits were NaN or Inf."""
        ...


class Recorder(Protocol):
    """Records steps and takes their tokens to the host."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """What runs a step again: on the same tensors, but not the code that names them. It may run it before, several
        times."""
        ...

    def fetch(self, tokens: Tensor) -> LateTokens:
        """What tokens [N] are by now; the host does not wait for them."""
        ...


class GraphRecorder:
    """Records CUDA graphs. All share one pool of memory and one stream: they run one after the other, and what a step
    leaves behind lies outside of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        stream = self._stream
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            try:
                # `torch.cuda.graph` alone takes a stream of the first card that recorded anything, and where a step
                # cannot be recorded it leaves its stream the current one.
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UPS):
                        step()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
                        step()
            finally:
                current.wait_stream(stream)  # kernels count in what the steps after this one count in
        return graph.replay

    def fetch(self, tokens: Tensor) -> LateTokens:
        with torch.cuda.device(self._device):
            return PinnedTokens(tokens)


class PinnedTokens:
    """The `LateTokens` of a GPU."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self._tokens.copy_(tokens, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    @property
    def arrived(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[int]:
        self._event.synchronize()
        return cast(list[int], self._tokens.tolist())


class EagerRecorder:
    """Records nothing, and runs a step again: for a CPU."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        return step

    def fetch(self, tokens: Tensor) -> LateTokens:
        return DeviceTokens(tokens.clone())


class DeviceTokens:
    """Tokens where they were drawn."""

    arrived = True

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def read(self) -> list[int]:
        return cast(list[int], self._tokens.tolist())


GreedyStep = Callable[[Decoder, Tensor, Tensor, Tensor, KVCache, bool], None]
"""`greedy_step`, compiled or not."""


def greedy_step(
    model: Decoder, rows: Tensor, last: Tensor, drawn: Tensor, cache: KVCache, one_slot: bool
) -> None:  # fmt: skip
    """Let each row's token be followed by the likeliest one, and go on to its position; all in place.

    Args:
        rows: of each row its slot, its position, and the place of its token in `last`, [3, N]. Positions go up to the
            last one of the cache, and stay there.
        last: tokens: those to go on from, and then those drawn.
        drawn: [N], the tokens drawn, or -1 where logits are NaN or Inf.
        one_slot: whether the cache has one.
    """
    slots, positions, places = rows.unbind(0)
    shape = (1, -1) if one_slot else (-1, 1)
    lengths = (positions + 1).view(shape) if model.config.follows_length else None
    hidden = model.hidden(
        last.index_select(0, places).view(shape), positions if one_slot else positions.view(shape), cache,
        slots=None if one_slot else slots, lengths=lengths,
    )  # fmt: skip
    logits = model.head(hidden.flatten(0, 1))
    tokens = logits.argmax(-1)
    low, high = torch.aminmax(logits, dim=-1)
    last.index_copy_(0, places, tokens)
    drawn.copy_(tokens.masked_fill((low.isfinite() & high.isfinite()).logical_not(), -1))
    positions.add_(1).clamp_(max=cache.length - 1)


@dataclass(frozen=True)
class _Recorded:
    """A step of so many rows: its tensors, and what runs it."""

    rows: Tensor
    drawn: Tensor
    replay: Callable[[], None]


class CapturedDecode:
    """Decodes sequences in slots of a cache greedily, by a step recorded once for each number of rows.

    A step begins where the last one ended: tokens and positions stay on the device. The host gives them anew only where
    other sequences, or other positions, are to go on.
    """

    def __init__(self, model: Decoder, cache: KVCache, last: Tensor, step: GreedyStep, recorder: Recorder) -> None:
        """
        Args:
            cache: whose last position is one of which nothing is ever read.
            last: the last token of each slot, and one more of no meaning, [slots + 1].
        """
        self._model, self._cache, self._last = model, cache, last
        self._step, self._recorder = step, recorder
        self._recorded: dict[int, _Recorded] = {}
        self._at: tuple[list[int], list[int]] | None = None  # slots and positions that the next step would go on from
        self._idle = len(last) - 1
        self.fails = False
        """Whether a step could not be recorded here, or gave other tokens than without; a warning has said so."""

    def decode(self, slots: Sequence[int], positions: Sequence[int], rows: int) -> LateTokens | None:
        """Draw the next token of each sequence, from the last one in its slot; None where steps cannot be recorded.

        Args:
            slots, positions: of the tokens to go on from [N].
            rows: how many of these there are; the others only make a number of rows that is recorded.
        """
        if not self.prepare(len(slots)):
            return None
        recorded = self._recorded[len(slots)]
        at = list(slots), list(positions)
        before, self._at = self._at, None  # as long as nothing is known, should this be broken off
        if at != before:
            places = [*at[0][:rows], *[self._idle] * (len(slots) - rows)]
            recorded.rows.copy_(numbers([*at[0], *at[1], *places], recorded.rows.device).view(3, -1))
        recorded.replay()
        most = self._cache.length - 1
        self._at = at[0], [min(position + 1, most) for position in at[1]]
        return self._recorder.fetch(recorded.drawn[:rows])

    @torch.inference_mode()
    def prepare(self, count: int) -> bool:
        """Record the step of so many rows, unless that is done, and try it once against itself; whether it may be used.

        It is tried with rows that mean nothing, at the cache's last position: sequences may be going on.
        """
        if count in self._recorded or self.fails:
            return not self.fails
        self._at = None
        device = self._last.device
        rest = [0] * count, [self._cache.length - 1] * count, [self._idle] * count
        rows = numbers([number for part in rest for number in part], device).view(3, -1)
        drawn = torch.zeros(count, dtype=torch.long, device=device)
        step = partial(self._step, self._model, rows, self._last, drawn, self._cache, len(self._last) == 2)

        def result(run: Callable[[], None]) -> Tensor:
            self._last[self._idle :].zero_()
            drawn.fill_(-2)  # no token, and not what is none
            for _ in range(2):
                run()
            return drawn.clone()

        try:
            replay = self._recorder.record(step)
            if not torch.equal(result(replay), result(step)):
                raise RuntimeError("other tokens than without recording")
        except Exception as error:  # of a driver or a compiler, which have kinds of their own
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            _log.warning("decoding steps cannot be recorded here (%s); they run one by one", reason)
            self.fails = True
            return False
        self._recorded[count] = _Recorded(rows, drawn, replay)
        return True
