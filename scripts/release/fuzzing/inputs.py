"""Input number i of a seed: which base, which of its files, which mutations; nothing else
decides it.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from fuzzing.bases import PARTIAL, Base, targets
from fuzzing.ggufs import mutate_gguf
from fuzzing.jsons import mutate_json
from fuzzing.pickles import mutate_pickle
from fuzzing.raw import HTML, LFS_POINTER, mutate_bytes, mutate_safetensors
from fuzzing.zips import mutate_zip

WHOLE_EVERY = 40
"""One of this many inputs goes through a whole convert, quantize, verify or resumed run."""
# How often a kind of file is mutated for a light trial, which hardly looks at the last two.
_WEIGHTS = {
    "zip": 6,
    "safetensors": 4,
    "gguf": 4,
    "config.json": 4,
    "params.json": 3,
    "generation_config.json": 0.3,
    "quantkit.json": 0.7,
}
_FILE_LEVEL = (
    "missing",
    "empty",
    "a folder",
    "a link outside",
    "a dangling link",
    "a link to itself",
    "a pipe",
    "a git-lfs pointer",
    "an HTML page",
    "spaces",
    "another file of the kind",
)


@dataclass(frozen=True)
class Input:
    """A folder to make and what to do with it.

    Attributes:
        kind: the kind of the mutated file.
        path: the mutated file.
        files: contents by path; or ``("link", target)``, where ``@`` is the link itself, ``("pipe",
            "")``, ``("folder", "")``.
        mutations: what was done, in words.
        job: a whole run, or ``light``.
    """

    number: int
    base: str
    kind: str
    path: str
    files: dict[str, bytes | tuple[str, str]]
    mutations: list[str]
    job: str


class Inputs:
    """All inputs of a seed.

    Numbers below 0 are the sound folders, one for each thing that is done with them.
    """

    def __init__(self, seed: int, bases: list[Base], kind: str | None = None) -> None:
        """
        Args:
            kind: the only kind of file that is mutated; None for all.
        """
        self._seed = seed
        self._targets = {whole: _by_kind(bases, whole) for whole in (False, True)}
        if kind is not None:
            self._targets = {whole: {kind: found[kind]} for whole, found in self._targets.items()}
        self._files = [
            (kind_of(path, data), path, data) for base in bases for path, data in base.files.items()
        ]

        self._sound = [
            (base, job) for base in bases for job in (*["light"] * base.light, *base.whole)
        ]

    @property
    def sound(self) -> range:
        """The numbers of the sound folders."""
        return range(-len(self._sound), 0)

    def make(self, number: int) -> Input:
        if number < 0:
            base, job = self._sound[number]
            return Input(number, base.name, "sound", "", dict(base.files), [], job)
        rng = Random(f"{self._seed}:{number}")
        whole = number % WHOLE_EVERY == 0
        by_kind = self._targets[whole]
        kinds = sorted(by_kind)
        kind = rng.choices(kinds, [1 if whole else _WEIGHTS.get(name, 2) for name in kinds])[0]
        base, path = rng.choice(by_kind[kind])
        others = [
            data
            for other, name, data in self._files
            if other == kind and name != path and len(data) < 1 << 20
        ]
        files: dict[str, bytes | tuple[str, str]] = dict(base.files)
        mutations = []
        for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
            content = files.get(path)
            if not isinstance(content, bytes):
                break
            if rng.random() < 0.06:
                changed, what = _file_level(rng, kind, others)
            else:
                changed, what = mutate(rng, kind, content, others)
            if changed is None:
                del files[path]
            else:
                files[path] = changed
            mutations.append(f"{path}: {what}")
        if kind == "partial" and rng.random() < 0.2:
            extra = rng.choice(
                ("model.safetensors", "config.json", "quantkit.json", "tokenizer.json", "README.md")
            )
            files[f"{PARTIAL}/{extra}"] = ("link", "../victim")
            mutations.append(f"{PARTIAL}/{extra}: planted link")
        return Input(
            number,
            base.name,
            kind,
            path,
            files,
            mutations,
            rng.choice(base.whole) if whole else "light",
        )


def kind_of(path: str, data: bytes) -> str:
    """The kind of a file, as mutations and counts name it."""
    name = path.rpartition("/")[2]
    if path.startswith(PARTIAL):
        return "journal" if "journal" in name else "partial"
    if name.endswith(".index.json"):
        return "index"
    if name.endswith(".safetensors"):
        return "safetensors"
    if name.endswith(".gguf"):
        return "gguf"
    if name.endswith((".pth", ".bin")):
        return "zip" if data[:2] == b"PK" else "legacy"
    return name


def mutate(rng: Random, kind: str, data: bytes, others: list[bytes]) -> tuple[bytes, str]:
    """One mutation that suits the kind of a file."""
    if kind in ("safetensors", "partial"):
        return mutate_safetensors(rng, data, others)
    if kind == "gguf":
        return mutate_gguf(rng, data, others)
    if kind == "zip":
        return mutate_zip(rng, data, others)
    if kind == "legacy":
        return mutate_pickle(rng, data, others)
    if kind == "journal":
        return _mutate_lines(rng, data, others)
    if kind.endswith(".json") or kind == "index":
        if rng.random() < 0.85 and (mutated := mutate_json(rng, data)) is not None:
            return mutated
    elif kind == "tokenizer.model" and data[:1] != b"\n" and rng.random() < 0.5:
        return _mutate_lines(rng, data, others)
    return mutate_bytes(rng, data, others)


def _mutate_lines(rng: Random, data: bytes, others: list[bytes]) -> tuple[bytes, str]:
    """A line dropped, doubled, moved, replaced, or mutated itself."""
    lines = data.splitlines(keepends=True)
    if not lines:
        return b"garbage\n", "one line of garbage"
    at = rng.randrange(len(lines))
    kind = rng.choice(("json", "json", "json", "drop", "double", "swap", "garbage", "bytes"))
    if kind == "json" and (mutated := mutate_json(rng, lines[at])) is not None:
        lines[at] = mutated[0] + b"\n"
        return b"".join(lines), f"line {at}{mutated[1]}"
    if kind == "drop":
        del lines[at]
    elif kind == "double":
        lines.insert(at, lines[at])
    elif kind == "swap":
        lines[at], lines[0] = lines[0], lines[at]
    elif kind == "garbage":
        lines[at] = rng.choice(
            (
                b"garbage\n",
                b"{}\n",
                b"[]\n",
                b"5\n",
                b"\n",
                b"null\n",
                b"{\n",
                b"\xff\xfe\n",
                b"YQ== -1\n",
            )
        )
    else:
        return mutate_bytes(rng, data, others)
    return b"".join(lines), f"line {at}: {kind}"


def _file_level(
    rng: Random, kind: str, others: list[bytes]
) -> tuple[bytes | tuple[str, str] | None, str]:
    what = rng.choice(_FILE_LEVEL)
    if what == "a pipe" and rng.random() < 0.5:
        what = "missing"
    simple: dict[str, bytes | tuple[str, str] | None] = {
        "missing": None,
        "empty": b"",
        "a folder": ("folder", ""),
        "a link outside": ("link", "../victim"),
        "a dangling link": ("link", "nowhere"),
        "a link to itself": ("link", "@"),
        "a pipe": ("pipe", ""),
        "a git-lfs pointer": LFS_POINTER,
        "an HTML page": HTML,
        "spaces": b" \n" * 20,
    }
    if what in simple:
        return simple[what], what
    return (rng.choice(others) if others else b"x"), what


def _by_kind(bases: list[Base], whole: bool) -> dict[str, list[tuple[Base, str]]]:
    found: dict[str, list[tuple[Base, str]]] = {}
    for base, path in targets(bases, whole=whole):
        if not path.endswith((".md", "LICENSE")):
            found.setdefault(kind_of(path, base.files[path]), []).append((base, path))
    return found
