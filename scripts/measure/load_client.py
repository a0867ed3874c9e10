"""A light client that loads a server of OpenAI's completions: streams over plain sockets, with the
time of each piece.

A closed loop has N clients that each send their next request when the last one is answered. An open
loop sends requests at given times, whatever the server does. `measure_serve.py` uses both.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

# In pieces without a token: how an answer ended, and what was used.
EMPTY = (
    b'"text":""',
    b'"text": ""',
)
DRAIN_SECONDS = 300.0


@dataclass
class Request:
    """A request: token ids, and the new tokens it wants."""

    prompt: list[int]
    new: int


@dataclass
class Answer:
    """What became of a request; times in seconds on one clock.

    Attributes:
        due: when it was to be sent.
        pieces: when each piece with text arrived.
        tokens: the new tokens that the server counted, once it has answered.
        problem: why there is no whole answer.
    """

    prompt: int
    new: int
    due: float
    pieces: list[float] = field(default_factory=list)
    tokens: int | None = None
    end: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Target:
    """A server at a port of this machine, and what its requests have besides the common fields."""

    port: int
    extra: dict[str, Any]


def requests(
    seed: str, prompt: tuple[int, int], new: tuple[int, int], ids: tuple[int, int]
) -> Iterator[Request]:
    """Endless requests, the same for the same seed: lengths are log-uniform between bounds, ids
    are uniform.
    """
    draw = random.Random(seed)

    def length(bounds: tuple[int, int]) -> int:
        return round(math.exp(draw.uniform(*map(math.log, bounds))))

    while True:
        count = length(prompt)
        yield Request([draw.randrange(*ids) for _ in range(count)], length(new))


async def send(target: Target, request: Request, found: Answer) -> None:
    """Send a request and note in `found` what comes."""
    body = json.dumps(
        {
            "prompt": request.prompt,
            "max_tokens": request.new,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **target.extra,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\nContent-Type:"
        f" application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        writer.write(head.encode() + body)
        status = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0]
        if b" 200" not in status:
            found.problem = f"{status.decode()} {(await reader.read(300)).decode(errors='replace')}"
            return
        left, usage = b"", b""
        while part := await reader.read(1 << 16):
            moment = time.perf_counter()
            *events, left = (left + part).split(b"\n\n")
            for event in events:
                if b'"completion_tokens"' in event:
                    usage = event
                if (
                    b'"choices"' in event
                    and not any(empty in event for empty in EMPTY)
                    and b'"text"' in event
                ):
                    found.pieces.append(moment)
        found.end = time.perf_counter()
        if usage:
            found.tokens = json.loads(usage[usage.index(b"{") :])["usage"]["completion_tokens"]
        if found.tokens != request.new:
            found.problem = f"{found.tokens} tokens, not {request.new}"
    except (OSError, asyncio.IncompleteReadError) as error:
        found.problem = repr(error)
    finally:
        if writer is not None:
            writer.close()


@dataclass(frozen=True)
class Window:
    """The time that counts, and the CPU seconds that the server used in it."""

    begin: float
    stop: float
    cpu_seconds: float


async def closed_loop(
    target: Target,
    work: Iterator[Request],
    clients: int,
    *,
    ramp: int,
    seconds: float,
    cpu: Callable[[], float],
) -> tuple[list[Answer], Window]:
    """Run `clients` at once; the answers, and the window that counts: `seconds` from when `ramp`
    requests have been answered. What runs at the end is given up. `cpu` returns the CPU seconds
    that the server has used.
    """
    found: list[Answer] = []
    ended, steady = 0, asyncio.Event()

    async def client() -> None:
        nonlocal ended
        while True:
            request = next(work)
            found.append(Answer(len(request.prompt), request.new, time.perf_counter()))
            await send(target, request, found[-1])
            if found[-1].end is None:
                await asyncio.sleep(0.1)
            ended += 1
            if ended >= ramp:
                steady.set()

    running = [asyncio.create_task(client()) for _ in range(clients)]
    await steady.wait()
    begin, used = time.perf_counter(), cpu()
    await asyncio.sleep(seconds)
    window = Window(begin, time.perf_counter(), cpu() - used)
    await _cancel(running)
    return found, window


async def open_loop(
    target: Target, work: Iterator[Request], rate: float, *, seconds: float, seed: str
) -> list[Answer]:
    """Send requests at random times (Poisson) for some time, and wait for all answers."""
    draw, found, running = random.Random(seed), list[Answer](), list[asyncio.Task[None]]()
    start = due = time.perf_counter()
    while (due := due + draw.expovariate(rate)) < start + seconds:
        await asyncio.sleep(due - time.perf_counter())
        request = next(work)
        found.append(Answer(len(request.prompt), request.new, due))
        running.append(asyncio.create_task(send(target, request, found[-1])))
    if running:
        await asyncio.wait(running, timeout=DRAIN_SECONDS)
    await _cancel(running)
    return found


async def _cancel(running: Sequence[asyncio.Task[None]]) -> None:
    for task in running:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*running, return_exceptions=True)


def throughput(found: list[Answer], window: Window) -> dict[str, float]:
    """Tokens and answers a second in a window; `all` has also the prompts whose first token came
    then.
    """
    begin, stop = window.begin, window.stop
    ended = [one for one in found if one.tokens is not None]
    pieces = sum(len(one.pieces) for one in ended)
    # Some tokens come without text.
    per_piece = sum(one.tokens or 0 for one in ended) / pieces if pieces else 1.0
    new = per_piece * sum(begin <= moment < stop for one in found for moment in one.pieces)
    prompts = sum(one.prompt for one in found if one.pieces and begin <= one.pieces[0] < stop)
    answers = sum(one.end is not None and begin <= one.end < stop for one in found)
    seconds = stop - begin
    return {
        "new": new / seconds,
        "all": (new + prompts) / seconds,
        "answers": answers / seconds,
        "all per CPU second": (new + prompts) / window.cpu_seconds,
        "cores": window.cpu_seconds / seconds,
    }


def latencies(found: list[Answer]) -> dict[str, float]:
    """Median and 99th percentile, in milliseconds: of the first token since a request was due, of
    the times between pieces of an answer, and of the means of these for each answer.
    """
    whole = [one for one in found if one.problem is None and one.pieces]
    gaps = [
        later - sooner
        for one in whole
        for sooner, later in zip(one.pieces, one.pieces[1:], strict=False)
    ]
    means = [(one.pieces[-1] - one.pieces[0]) / (one.new - 1) for one in whole if one.new > 1]
    kinds: dict[str, Callable[[], list[float]]] = {
        "first": lambda: [one.pieces[0] - one.due for one in whole],
        "between": lambda: gaps,
        "mean": lambda: means,
    }
    result = {"whole": float(len(whole)), "failed": float(len(found) - len(whole))}
    for kind, values in kinds.items():
        for name, share in (("median", 0.5), ("p99", 0.99)):
            result[f"{kind} {name}"] = 1000 * percentile(values(), share)
    return result


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of all lies, interpolated; NaN of none."""
    if len(values) < 2:
        return values[0] if values else math.nan
    if share == 0.5:
        return statistics.median(values)
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]
