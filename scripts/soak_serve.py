"""Whether a server stays sound under clients of all kinds.

    python scripts/soak_serve.py MODEL [--seconds 600] [--clients 32]

Starts `quantkit serve MODEL` on the exact CPU kernels. Of what the clients send, a fourth is
streams that are left at once, and a tenth garbage; one client sends 100 MB, one a byte a second.
Every other answer, greedy, drawn with a seed or JSON of a schema, is compared with the answer to
the same request alone. Memory is compared after a fifth of the time, when the cache is full, and at
the end. Then the server gets SIGTERM while answers are computed. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

COMPLETIONS = "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
}
MAX_GROWTH = 0.03
SECONDS = 120.0  # that a client waits for an answer


class Server:
    def __init__(self, model: str) -> None:
        command = [
            sys.executable,
            "-m",
            "quantkit.cli",
            "serve",
            model,
            "--port",
            "0",
            "--backend",
            "cpu-exact",
        ]
        self.process = subprocess.Popen(
            [*command, "--context", "512"], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        found = re.search(r"http://([\d.]+):(\d+)/v1", self.process.stdout.readline())
        assert found is not None
        self.host, self.port = found[1], int(found[2])

    def post(self, body: bytes) -> tuple[int, bytes]:
        with closing(
            http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)
        ) as connection:
            connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()

    def text(self, request: dict[str, Any]) -> tuple[int, str | None]:
        status, content = self.post(json.dumps(request).encode())
        return status, json.loads(content)["choices"][0]["text"] if status == 200 else None

    def opened(self, length: int) -> socket.socket:
        """A connection with the head of a request whose body has this length."""
        found = socket.create_connection((self.host, self.port), timeout=SECONDS)
        found.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {length}\r\n\r\n".encode()
        )
        return found

    def running(self) -> float:
        with closing(
            http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)
        ) as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        return next(
            float(line.split()[1])
            for line in lines
            if line.startswith("quantkit_running_requests ")
        )

    def memory(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(
            int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")
        )


def requests() -> list[dict[str, Any]]:
    """What clients send."""
    found: list[dict[str, Any]] = []
    for number in range(12):
        prompt = (
            f"My fellow citizens, there are {number} reasons. The first one, the second one, and"
            " the first one: "
        )
        form = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA}}
        found += [
            {"prompt": prompt, "max_tokens": 24, "temperature": 0},
            {
                "prompt": prompt * (1 + number % 4),
                "max_tokens": 16,
                "temperature": 1.0,
                "seed": number,
            },
            {
                "prompt": prompt,
                "max_tokens": 40,
                "temperature": 0.5,
                "seed": number,
                "response_format": form,
            },
        ]
    return found


class Clients:
    def __init__(self, server: Server, alone: list[str | None], stop: float) -> None:
        self._server, self._alone, self._stop = server, alone, stop
        self._sent = requests()
        self._lock, self.counts = threading.Lock(), Counter[str]()

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def mixed(self, seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < self._stop:
            kind = chance.random()
            try:
                if kind < 0.25:
                    self._leave(chance)
                elif kind < 0.35:
                    self._send_garbage(chance)
                else:
                    self._compare(chance)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.count(f"error: {type(error).__name__}")

    def slow(self) -> None:
        with closing(self._server.opened(10_000)) as connection, suppress(OSError):
            while time.monotonic() < self._stop:
                connection.sendall(b" ")
                time.sleep(1)
        self.count(
            "slow client refused"
            if time.monotonic() < self._stop
            else "error: slow client was not refused"
        )

    def large(self) -> None:
        try:
            self.count(f"100 MB: status {self._server.post(b' ' * (100 << 20))[0]}")
        except OSError:  # the server has closed the connection
            self.count("100 MB: refused")

    def _leave(self, chance: random.Random) -> None:
        body = json.dumps({"prompt": "Once upon", "max_tokens": 300, "stream": True}).encode()
        with closing(self._server.opened(len(body))) as connection:
            connection.sendall(body)
            connection.recv(200)
            time.sleep(0.3 * chance.random())
        self.count("left")

    def _send_garbage(self, chance: random.Random) -> None:
        with closing(
            socket.create_connection((self._server.host, self._server.port), timeout=2)
        ) as connection:
            connection.sendall(
                chance.randbytes(300) if chance.random() < 0.5 else b"POST / HTTP/1.1\r\n\r\n{{{"
            )
            with suppress(OSError):
                connection.recv(200)
        self.count("garbage")

    def _compare(self, chance: random.Random) -> None:
        number = chance.randrange(len(self._sent))
        status, text = self._server.text(self._sent[number])
        if status == 200:
            self.count("answers" if text == self._alone[number] else "error: another answer")
        else:
            self.count("429" if status == 429 else f"error: status {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=32)
    options = parser.parse_args()
    server = Server(options.model)
    alone = [server.text(one)[1] for one in requests()]
    clients = Clients(server, alone, time.monotonic() + options.seconds)
    threads = [
        threading.Thread(target=clients.mixed, args=(seed,)) for seed in range(options.clients)
    ]
    threads += [threading.Thread(target=clients.slow), threading.Thread(target=clients.large)]
    for thread in threads:
        thread.start()
    time.sleep(options.seconds / 5)
    before = server.memory()
    for thread in threads:
        thread.join()
    time.sleep(1)
    after, running = server.memory(), server.running()
    for what, count in sorted(clients.counts.items()):
        print(f"{what}: {count}")
    print(
        f"memory: {before / 1024:.0f} MiB, then {after / 1024:.0f} MiB ({after / before - 1:+.1%})"
    )
    print(f"requests that still run: {running:.0f}")
    ending = threading.Thread(
        target=lambda: print("the last answer: status", server.text(requests()[0])[0])
    )
    ending.start()
    time.sleep(0.05)
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait(60)
    ending.join()
    print(f"exit code after SIGTERM: {code}")
    wrong = any(what.startswith("error") for what in clients.counts)
    sys.exit(int(wrong or after > before * (1 + MAX_GROWTH) or running != 0 or code != 0))


if __name__ == "__main__":
    main()
