r"""Compare `quantkit serve` under load with llama.cpp's llama-server, and with vLLM: tables in
Markdown.

    python scripts/measure/measure_serve.py INT4_FOLDER --peer LLAMA_SERVER --gguf M.gguf \
        [--vllm PYTHON] [--backends cpu-fast] [--clients 1 4 8 16 32] [--slots 8] \
        [--arrivals 0.5 0.8] [--seconds 30] [--rounds 3] [--seed 0] [--json OUT]
    python scripts/measure/measure_serve.py --make FOLDER        # random weights of TinyLlama's \
        shape, with a tokenizer

`scripts/peers/llama_server.sh` builds LLAMA_SERVER, and `peer_llamacpp.py` makes the GGUF file of
that shape. Requests are streamed completions of random token ids, greedy, with lengths that are
log-uniform in `--prompt` and `--new`; every answer has its full length: quantkit's folder is served
without its end tokens, the others ignore them. All servers get the same requests and the same
threads. They run one at a time: those that are not measured are stopped by SIGSTOP, and rounds take
turns. A closed loop has as many requests at once as clients; where there are more clients than
`--slots`, also with as many slots as clients, and each server's better number counts. An open loop
has random arrivals, at a share of what the slowest server answered in its best closed loop.

Figures are medians over the rounds; in parentheses the medians of the ratios to llama-server, in a
closed loop of new tokens, of all tokens, and of all tokens per CPU second of the server. On a
machine with other load the last one is the most reliable, with `--threads 1`: threads that wait for
each other at a barrier use CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load_client import (
    Answer,
    Target,
    closed_loop,
    latencies,
    open_loop,
    requests,
    send,
    throughput,
)

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.ratios import median_ratio
from shared.tables import format_header, format_row

START_SECONDS = 600.0
FIRST_ID = 300  # below are special tokens and bytes
LLAMA, VLLM = "llama-server", "vLLM"


@dataclass
class Server:
    """A server that runs, or is stopped while others are measured."""

    label: str
    slots: int
    command: list[str]
    extra: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, port: int, log: Path) -> None:
        self.target = Target(port, self.extra)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [one.replace("PORT", str(port)) for one in self.command],
                stdout=output,
                stderr=output,
                env=os.environ | self.environment,
                start_new_session=True,
            )
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{self.label} did not start: see {log}") from None
                time.sleep(0.5)
        self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def end(self) -> None:
        """End it, also while it starts."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def cpu_seconds(self) -> float:
        """Of all its processes so far."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # a process that has ended
                fields = path.read_text().rpartition(")")[2].split()
                ticks += (
                    int(fields[11]) + int(fields[12]) if int(fields[2]) == self._process.pid else 0
                )
        return ticks / os.sysconf("SC_CLK_TCK")


def make(folder: Path, scheme: str) -> Path:
    """Return a quantized folder of random weights with a tokenizer of letters, pairs and triples,
    in which every token has printable text.
    """
    from itertools import islice, product

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from shared.models import make_tinyllama

    model = make_tinyllama(folder, scheme, None)
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = [chr(code) for code in range(33, 127)]
    merges = [*product(plain, plain), *((a + b, c) for a, b, c in product(plain, plain, plain))]
    merges = list(islice(merges, size - len(letters)))
    tokens = [*letters, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model / "tokenizer.json"))
    return model


def link_without_ends(source: Path, folder: Path) -> Path:
    """Return a view of a folder whose config names no end token."""
    view = folder / source.resolve().name
    view.mkdir()
    for path in source.resolve().iterdir():
        if path.name in ("config.json", "generation_config.json"):
            settings = json.loads(path.read_text())
            (view / path.name).write_text(json.dumps(settings | {"eos_token_id": None}))
        else:
            (view / path.name).symlink_to(path)
    return view


def servers(options: argparse.Namespace, folder: Path, slots: int) -> list[Server]:
    """Those to be compared: ours first, in the order in which they are measured."""
    threads, context = str(options.threads), options.prompt[1] + options.new[1] + 256
    found = []
    for backend in options.backends:
        kernels = [] if backend == "default" else ["--backend", backend]
        command = [
            str(Path(sys.executable).with_name("quantkit")),
            "serve",
            str(folder),
            "--port",
            "PORT",
            "--slots",
            str(slots),
            "--waiting",
            "64",
            "--context",
            str(context),
            "--threads",
            threads,
            *kernels,
        ]
        found.append(
            Server("quantkit" if backend == "default" else f"quantkit, {backend}", slots, command)
        )
    if options.peer:
        command = [
            options.peer,
            "-m",
            str(options.gguf),
            "--host",
            "127.0.0.1",
            "--port",
            "PORT",
            "--parallel",
            str(slots),
            "-c",
            str(slots * context),
            "-t",
            threads,
            "-tb",
            threads,
            "--no-webui",
            *options.peer_options.split(),
        ]
        found.append(Server(LLAMA, slots, command, {"ignore_eos": True}))
    if options.vllm:
        command = [
            options.vllm,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(options.folder.resolve()),
            "--host",
            "127.0.0.1",
            "--port",
            "PORT",
            "--max-num-seqs",
            str(slots),
            "--max-model-len",
            str(context),
            "--dtype",
            "bfloat16",
            "--no-enable-prefix-caching",
            "--served-model-name",
            "model",
            *["--enforce-eager"] * options.vllm_eager,
        ]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": threads}
        found.append(
            Server(VLLM, slots, command, {"ignore_eos": True, "model": "model"}, environment)
        )
    return found


def find_free_port() -> int:
    """Return a port that nothing uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Measurement:
    """Runs loads on servers in turn, and keeps what was found."""

    def __init__(self, options: argparse.Namespace, vocabulary: int) -> None:
        self._options, self._ids = options, (FIRST_ID, vocabulary)
        self.runs: list[dict[str, Any]] = []

    def run(self, server: Server, kind: str, load: float, number: int) -> dict[str, Any]:
        """One load on a server: of a number of clients, or of arrivals a second."""
        server.signal(signal.SIGCONT)
        try:
            found = asyncio.run(self._load(server, kind, load, number))
        finally:
            server.signal(signal.SIGSTOP)
        known = {
            "server": server.label,
            "slots": server.slots,
            "kind": kind,
            "load": load,
            "round": number,
        }
        self.runs.append(known | found | {"machine load": os.getloadavg()[0]})
        print(json.dumps(self.runs[-1]), file=sys.stderr, flush=True)
        if self._options.json:
            self._options.json.write_text(json.dumps(self.runs, indent=1))
        return self.runs[-1]

    async def _load(self, server: Server, kind: str, load: float, number: int) -> dict[str, Any]:
        options, target = self._options, server.target
        # no prompt twice: servers keep them
        seed = f"{options.seed} {kind} {load} {server.slots} {number}"
        work = requests(seed, options.prompt, options.new, self._ids)
        first = next(requests("warm", (16, 17), (4, 5), self._ids))
        warm = Answer(len(first.prompt), first.new, time.perf_counter())
        await send(target, first, warm)  # also waits for what was given up
        if warm.problem is not None:
            raise SystemExit(f"{server.label}: {warm.problem}")
        own, start = time.process_time(), time.perf_counter()
        if kind == "closed":
            clients = int(load)
            ramp = max(1, min(clients, server.slots) // 2)
            answers, window = await closed_loop(
                target, work, clients, ramp=ramp, seconds=options.seconds, cpu=server.cpu_seconds
            )
            found: dict[str, Any] = throughput(answers, window) | {"ramp": window.begin - start}
            within = [one for one in answers if one.due >= window.begin and one.end is not None]
        else:
            answers = within = await open_loop(
                target, work, load, seconds=options.open_seconds, seed=seed
            )
            found = {}
        seconds = time.perf_counter() - start
        return (
            found
            | latencies(within)
            | {
                "problems": sorted(
                    {
                        one.problem
                        for one in answers
                        if one.problem is not None and one.end is not None
                    }
                ),
                "client's CPU": (time.process_time() - own) / seconds,
            }
        )


def median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def ratio(over: list[dict[str, Any]], under: list[dict[str, Any]], key: str) -> float:
    """Return the median of the ratios of what was measured in the same rounds."""
    return median_ratio((run[key] for run in over), (run[key] for run in under))


def best(runs: list[dict[str, Any]], label: str, load: float) -> list[dict[str, Any]]:
    """A server's runs with the number of slots that gave the most tokens."""
    by: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        if (run["server"], run["kind"], run["load"]) == (label, "closed", load):
            by[run["slots"]].append(run)
    return max(by.values(), key=lambda found: median(found, "all"))


def closed_table(runs: list[dict[str, Any]], labels: list[str], clients: list[int]) -> list[str]:
    """New tokens a second; all tokens a second, the slots of the better setting, and ratios."""
    lines = [format_header("new tok/s (all tok/s), clients", *map(str, clients))]
    for label in labels:
        cells = []
        for load in clients:
            found, cell = best(runs, label, load), ""
            if LLAMA in labels and label != LLAMA:
                peer = best(runs, LLAMA, load)
                kinds = ("new", "all", "all per CPU second")
                cell = "".join(f"; {ratio(found, peer, kind):.2f} x" for kind in kinds)
            slots = f", {found[0]['slots']} slots"
            cells.append(f"{median(found, 'new'):.1f} ({median(found, 'all'):.0f}{slots}{cell})")
        lines.append(format_row(label, *cells))
    return lines


def open_table(runs: list[dict[str, Any]], labels: list[str]) -> list[str]:
    """Times to the first token and between tokens, at each rate of arrivals."""
    names = [
        "first median",
        "first p99",
        "between median",
        "between p99",
        "mean median",
        "mean p99",
    ]
    lines = [format_header("ms, at a rate of requests", *names)]
    for rate in sorted({run["load"] for run in runs if run["kind"] == "open"}):
        at = {
            one: [run for run in runs if (run["server"], run["load"]) == (one, rate)]
            for one in labels
        }
        for label in labels:
            cells = []
            for name in names:
                peer = (
                    f" ({ratio(at[label], at[LLAMA], name):.2f} x)"
                    if LLAMA in at and label != LLAMA
                    else ""
                )
                cells.append(f"{median(at[label], name):.0f}{peer}")
            lines.append(format_row(f"{label}, {rate:.2f}/s", *cells))
    return lines


def measure(options: argparse.Namespace) -> None:
    vocabulary = int(json.loads((options.folder / "config.json").read_text())["vocab_size"])
    measurement = Measurement(options, vocabulary)
    base = options.slots
    settings = {base: options.clients} | {
        count: [count] for count in options.clients if count > base
    }
    with tempfile.TemporaryDirectory() as temporary:
        view, log = link_without_ends(options.folder, Path(temporary)), Path(temporary) / "log"
        for slots, clients in settings.items():
            running = []
            try:
                for server in servers(options, view, slots):
                    running.append(server)
                    server.start(find_free_port(), log)
                for count in clients:
                    for number in range(options.rounds):
                        for server in running:
                            measurement.run(server, "closed", count, number)
                if slots == base:
                    labels = [server.label for server in running]
                    capacity = min(
                        max(
                            median(best(measurement.runs, label, count), "answers")
                            for count in clients
                        )
                        for label in labels
                    )
                    for share in options.arrivals:
                        for number in range(options.rounds):
                            for server in running:
                                measurement.run(server, "open", share * capacity, number)
            except SystemExit:
                shutil.copy(log, "measure_serve.log")
                raise
            finally:
                for server in running:
                    server.end()
    print("\n".join(closed_table(measurement.runs, labels, options.clients)))
    if options.arrivals:
        print("\n".join(["", *open_table(measurement.runs, labels)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--make", type=Path)
    parser.add_argument("--scheme", default="int4-g128")
    parser.add_argument("--backends", nargs="*", default=["default"])
    parser.add_argument("--peer")
    parser.add_argument("--peer-options", default="")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--vllm")
    parser.add_argument("--vllm-eager", action="store_true")
    parser.add_argument("--clients", nargs="*", type=int, default=[1, 4, 8, 16, 32])
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--arrivals", nargs="*", type=float, default=[0.5, 0.8])
    parser.add_argument("--prompt", nargs=2, type=int, default=[64, 1024])
    parser.add_argument("--new", nargs=2, type=int, default=[16, 256])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--open-seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options: Any = parser.parse_args()
    if options.make is not None:
        return print(make(options.make, options.scheme))
    if options.folder is None:
        parser.error("a folder is needed")
    for number in (signal.SIGINT, signal.SIGTERM):  # servers that are stopped would stay for ever
        signal.signal(number, lambda *_: sys.exit("interrupted"))
    measure(options)
    return None


if __name__ == "__main__":
    main()
