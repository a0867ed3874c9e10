"""One input: its folder is made, the commands are run in this process, what came out is judged."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fuzzing import oracle
from fuzzing.bases import MTIME_NS
from fuzzing.inputs import Input
from quantkit.cli.main import main
from quantkit.errors import QuantkitError
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.tensors.qtensor import QuantTensor

DOCUMENTED = {0, 2, 3, 4, 5, 6, 7, 8, 10, 11}
ORACLE_PHASE = b"reading"
_VICTIM = b"not to be touched\n" * 100
_TEXT = "The quick brown fox, 42 times: déjà vu \U0001f98a\n\tthe end."
_JOBS = {
    "convert-hf": ["convert", "src", "dst"],
    "convert-meta": ["convert", "src", "dst", "--to", "meta", "--mp", "2"],
    "quantize-int8": ["quantize", "src", "dst", "--scheme", "int8"],
    "quantize-int4-g32": ["quantize", "src", "dst", "--scheme", "int4-g32", "--method", "rtn"],
    "verify": ["verify", "src"],
}


_EXPECTED = re.compile(r"quantkit: (note: |[^:]+(: [^:]+)?: \d+/\d+ [a-z]+(, [\d:]+ left)?$)")


@dataclass(frozen=True)
class Outcome:
    """What became of one input.

    Attributes:
        codes: exit codes by command; the opener's is that of the error it raised.
        refused: why the independent readers refused a source that quantkit took, if they did.
        findings: what breaks the rule.
    """

    number: int
    kind: str
    job: str
    codes: dict[str, int]
    refused: str | None
    findings: list[str]


class Bench:
    """A working folder of this process, which is made its current folder, with streams that are
    caught.
    """

    def __init__(self, folder: Path, bases: Path) -> None:
        folder.mkdir()
        os.chdir(folder)
        self._bases = bases
        self._sound: dict[str, dict[str, Tensor]] = {}
        self._err = os.memfd_create("stderr")
        os.dup2(os.memfd_create("stdout"), 1)
        os.dup2(self._err, 2)
        Path("victim").write_bytes(_VICTIM)

    def run(self, trial: Input, phase: Callable[[bytes], None]) -> Outcome:
        """Carry out one input; `phase` is called with what begins."""
        phase(b"making")
        _make(trial)
        before = _listing(Path("src"))
        existing = {name for name in ("dst", "dst.partial") if os.path.lexists(name)}
        codes: dict[str, int] = {}
        refused, findings = None, []
        if trial.job == "light":
            codes["inspect"] = self._command(["inspect", "src"], findings, phase)
            codes["open"], refused = self._open(trial.base, findings, phase)
        else:
            job = trial.job.removeprefix("resume-")
            arguments = _JOBS[job] + (["--resume"] if job != trial.job else [])
            code = codes[trial.job] = self._command(arguments, findings, phase)
            if code == 0:
                phase(ORACLE_PHASE)
                refused = self._judge(trial.base, job, findings)
                if job != "verify":
                    codes["verify"] = self._command(["verify", "dst"], findings, phase)
                    if codes["verify"] != 0:
                        findings.append(f"verify of a finished output exits {codes['verify']}")
            elif os.path.lexists("dst"):
                findings.append(f"dst exists after exit code {code}")
        if not trial.mutations and any(codes.values()):
            findings.append(f"the sound base {trial.base} is refused: {codes}")
        phase(b"looking")
        _join_threads()
        if _listing(Path("src")) != before:
            findings.append("the source was changed")
        if Path("victim").read_bytes() != _VICTIM or Path("victim").stat().st_mtime_ns != MTIME_NS:
            findings.append("a file outside was changed")
        allowed = {"src", "victim", *existing} | (
            set() if trial.job in ("light", "verify") else {"dst", "dst.partial"}
        )
        if strange := sorted(set(os.listdir()) - allowed):
            findings.append(f"made {', '.join(strange)}: code was run, or a file written outside")
        return Outcome(trial.number, trial.kind, trial.job, codes, refused, findings)

    def _command(
        self, arguments: list[str], findings: list[str], phase: Callable[[bytes], None]
    ) -> int:
        """Exit code of a command, whose stderr must be progress, notes and, if it fails, one
        error.
        """
        phase(arguments[0].encode())
        os.ftruncate(self._err, 0)
        os.lseek(self._err, 0, os.SEEK_SET)
        try:
            main(arguments)
            code: object = "none"
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            code = "a traceback"
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os.ftruncate(1, 0)
        os.lseek(1, 0, os.SEEK_SET)
        text = os.pread(self._err, 1 << 20, 0).decode(errors="replace")
        lines = [line for line in text.splitlines() if not _EXPECTED.match(line)]
        if code not in DOCUMENTED or not isinstance(code, int):
            findings.append(f"{arguments[0]} ends in {code}: {lines[-1] if lines else ''}")
            return code if isinstance(code, int) else 1
        expected = code not in (0, 10, 11)
        if [line.startswith("quantkit: error: ") for line in lines] != [True] * expected:
            findings.append(
                f"{arguments[0]} exits {code} with {len(lines)} lines on stderr:"
                f" {' | '.join(lines[:3])}"
            )
        elif expected and not re.search(r"\b(src|dst)\b", lines[0]):
            findings.append(f"{arguments[0]} exits {code} and names nothing: {lines[0]}")
        return code

    def _open(
        self, base: str, findings: list[str], phase: Callable[[bytes], None]
    ) -> tuple[int, str | None]:
        """Open the source, load all of it and tokenize a string; the code of the error, and why
        the readers refused.
        """
        phase(b"open")
        loaded: dict[str, Tensor] = {}
        try:
            checkpoint = open_checkpoint("src")
            for name in checkpoint.names():
                value = checkpoint.load(name)
                floats = value.dequantize() if isinstance(value, QuantTensor) else value
                loaded[name] = oracle.plain_nans(floats) if checkpoint.format == "gguf" else floats
            tokenizer, _ = load_checked_tokenizer(checkpoint)
            if tokenizer is not None:
                tokenizer.decode(tokenizer.encode(_TEXT))
        except QuantkitError as error:
            return error.exit_code, None
        except BaseException as error:  # a panic of a Rust library is no Exception
            findings.append(
                f"open raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            )
            return 1, None
        phase(ORACLE_PHASE)
        reading, refused = self._reading(base, checksums=False)
        problem = oracle.same(loaded, oracle.dequantized(reading))
        if problem is not None:
            findings.append(_broken("opened weights", refused, problem))
        return 0, refused

    def _judge(self, base: str, job: str, findings: list[str]) -> str | None:
        """Hold what a whole run gave against the reading of its source; why the readers refused
        that.
        """
        reading, refused = self._reading(base, checksums=True)
        if job == "verify":
            sound = self._sound_reading(base)
            problem = refused or oracle.same(reading, sound)
            if problem:
                findings.append(
                    f"verify passes a folder whose weights are not those written: {problem}"
                )
            return None
        try:
            result = oracle.read(Path("dst"))
        except Exception as error:
            findings.append(f"dst cannot be read: {type(error).__name__}: {error}")
            return refused
        if job.startswith("quantize"):
            problem = oracle.rounded(result, reading)
        elif any(Path("src").glob("*.gguf")):
            problem = oracle.same(oracle.as_numbers(result), oracle.as_numbers(reading))
        else:
            problem = oracle.same(result, reading)
        if problem is not None:
            findings.append(_broken(job, refused, problem))
        for name in os.listdir("dst"):
            copied = Path("src", name)
            if (
                name.startswith("tokenizer")
                and copied.is_file()
                and copied.read_bytes() != Path("dst", name).read_bytes()
            ):
                findings.append(f"{name} was not copied as it is")
        return refused

    def _reading(self, base: str, *, checksums: bool) -> tuple[dict[str, Tensor], str | None]:
        """The independent reading of the source; of the sound one, where the readers refuse, and
        why.
        """
        try:
            return oracle.read(Path("src"), checksums=checksums), None
        except Exception as error:
            return (
                self._sound_reading(base),
                f"{type(error).__name__}: {' '.join(str(error).split())[:150]}",
            )

    def _sound_reading(self, base: str) -> dict[str, Tensor]:
        if base not in self._sound:
            self._sound[base] = oracle.read(self._bases / base / "src")
        return self._sound[base]


def _broken(what: str, refused: str | None, problem: str) -> str:
    if refused is None:
        return f"{what} are not the source's: {problem}"
    return (
        f"{what} are neither those of the sound file nor vouched for by other readers ({refused}):"
        f" {problem}"
    )


def _make(trial: Input) -> None:
    for name in os.listdir():
        if os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name)
        else:
            os.unlink(name)
    Path("victim").write_bytes(_VICTIM)
    os.utime("victim", ns=(MTIME_NS, MTIME_NS))
    os.mkdir("src")
    for path, content in trial.files.items():
        if path.startswith("dst.partial") and not os.path.isdir("dst.partial"):
            os.mkdir("dst.partial")
        if isinstance(content, bytes):
            Path(path).write_bytes(content)
            if path.startswith("src"):  # a journal knows the sound ones by size and time
                time_ns = MTIME_NS + 10**9 * (path == trial.path)
                os.utime(path, ns=(time_ns, time_ns))
        elif content[0] == "link":
            os.symlink(path.rpartition("/")[2] if content[1] == "@" else content[1], path)
        elif content[0] == "pipe":
            os.mkfifo(path)
        else:
            os.mkdir(path)


def _listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for entry in os.scandir(folder):
        stat = entry.stat(follow_symlinks=False)
        found[entry.name] = (stat.st_mode, stat.st_size, stat.st_mtime_ns)
    return found


def _join_threads() -> None:
    """Wait for threads that a failed run left behind, so that they meet no other input's files."""
    until = time.monotonic() + 2
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(max(0.0, until - time.monotonic()))
