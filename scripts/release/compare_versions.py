r"""Run the same jobs with two versions of quantkit and compare every byte of what they write.

    python scripts/release/compare_versions.py OLD_PYTHON NEW_PYTHON MODEL TEXT --work \
        /tmp/compared

OLD_PYTHON and NEW_PYTHON are the interpreters of two environments, MODEL a Meta folder of floats,
TEXT a text to calibrate on. The order of the jobs is that of `JOBS`; a job may read what an earlier
one wrote. Prints a table in Markdown and exits with 1 if a file differs. Of `quantkit.json`, the
version and format version are left aside, keys and reasons are compared in their newest words.
`--words` leaves the model card aside too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

_GPTQ = ["--method", "gptq", "--samples", "16", "--length", "128", "--calibration", "TEXT"]
JOBS: dict[str, tuple[int, list[str]]] = {
    "hf": (1, ["convert", "MODEL", "OUT"]),
    "hf-bf16": (1, ["convert", "MODEL", "OUT", "--dtype", "bf16"]),
    "meta-mp1": (1, ["convert", "@hf", "OUT", "--to", "meta"]),
    "meta-mp2": (1, ["convert", "@hf", "OUT", "--to", "meta", "--mp", "2"]),
    "int8": (1, ["quantize", "@hf", "OUT", "--scheme", "int8"]),
    "int4-g128": (
        1,
        [
            "quantize",
            "MODEL",
            "OUT",
            "--scheme",
            "int4-g128",
            "--method",
            "rtn",
            "--accept-quality-loss",
        ],
    ),
    "int4-g64-head": (
        1,
        [
            "quantize",
            "@hf-bf16",
            "OUT",
            "--scheme",
            "int4-g64",
            "--method",
            "rtn",
            "--head",
            "int8",
        ],
    ),
    "int4-g32-asym": (
        1,
        ["quantize", "@hf", "OUT", "--scheme", "int4-g32-asym", "--method", "rtn"],
    ),
    "gptq": (1, ["quantize", "@hf", "OUT", "--scheme", "int4-g64", *_GPTQ]),
    "gptq-asym-thorough": (
        1,
        ["quantize", "@hf-bf16", "OUT", "--scheme", "int4-g64-asym", "--thorough", *_GPTQ],
    ),
    "gptq-keep-meta": (
        1,
        ["quantize", "MODEL", "OUT", "--scheme", "int8", "--keep", "model.layers.0.*", *_GPTQ],
    ),
    "gptq-two-processes": (2, ["quantize", "@hf", "OUT", "--scheme", "int4-g64", *_GPTQ]),
    "quantized-again": (1, ["convert", "@gptq", "OUT"]),
}
"""By the folder that each makes: the number of processes, and the arguments; `@` leads to what
an earlier job made.
"""

_RENAMED = {"plan": "recipe", "tensors": "modules"}
_REWORDED = {"kept as float by the plan": "kept as float by the recipe"}
_VERSIONS = ("quantkit_version", "format_version")


def run(python: str, folder: Path, name: str, model: Path, text: Path) -> None:
    """Run one job in an environment; `folder` holds what its jobs wrote."""
    processes, arguments = JOBS[name]
    places = {"MODEL": str(model), "TEXT": str(text), "OUT": str(folder / name)}
    words = [
        places.get(word, str(folder / word[1:]) if word.startswith("@") else word)
        for word in arguments
    ]
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        if processes > 1
        else []
    )
    command = [python, *launcher, "-m", "quantkit.cli", *words]
    # Not where a checkout is.
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        sys.exit(f"{name} with {python} exits with {done.returncode}:\n{done.stderr}")


def differences(old: Path, new: Path, *, words: bool) -> list[str]:
    """The files of two folders that are not the same."""
    names = sorted({path.name for folder in (old, new) for path in folder.iterdir()})
    found = []
    for name in names:
        first, second = old / name, new / name
        if not (first.is_file() and second.is_file()):
            found.append(f"{name} (in one only)")
        elif name == "quantkit.json":
            left, right = (_manifest(path, words=words) for path in (first, second))
            found += [
                f"{name}: {key}" for key in {**left, **right} if left.get(key) != right.get(key)
            ]
        elif not (words and name == "README.md") and first.read_bytes() != second.read_bytes():
            found.append(name)
    return found


def _manifest(path: Path, *, words: bool) -> dict[str, Any]:
    """A manifest under its newest keys, without what differs between versions."""
    text = path.read_text()
    for old, new in _REWORDED.items():
        text = text.replace(old, new)
    made = {_RENAMED.get(key, key): value for key, value in json.loads(text).items()}
    for key in _VERSIONS:
        made.pop(key, None)
    if words:
        made["files"].pop("README.md", None)
        made["source"]["sha256"].pop("quantkit.json", None)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument(
        "--work", type=Path, required=True, help="a folder to make, gone in the end"
    )
    parser.add_argument("--words", action="store_true", help="model cards may differ")
    parser.add_argument("--jobs", default=",".join(JOBS), help="by name, separated by commas")
    options = parser.parse_args()
    options.work = options.work.resolve()
    options.work.mkdir()
    any_differs = False
    print("| job | processes | files | bytes | differing |\n|---|---|---|---|---|")
    for name in options.jobs.split(","):
        for side, python in (("old", options.old), ("new", options.new)):
            (options.work / side).mkdir(exist_ok=True)
            run(python, options.work / side, name, options.model.resolve(), options.text.resolve())
        found = differences(
            options.work / "old" / name, options.work / "new" / name, words=options.words
        )
        files = list((options.work / "new" / name).iterdir())
        size = sum(path.stat().st_size for path in files)
        print(
            f"| {name} | {JOBS[name][0]} | {len(files)} | {size} | {', '.join(found) or 'none'} |",
            flush=True,
        )
        any_differs = any_differs or bool(found)
    shutil.rmtree(options.work)
    sys.exit(int(any_differs))


if __name__ == "__main__":
    main()
