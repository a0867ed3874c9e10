"""Build quantkit's packages: a source archive, a wheel for any machine, and wheels with compiled
CPU kernels.

    python scripts/release/build_wheels.py [--output dist] [--only PLATFORM ...]

Zig's C++ compiler, a package on the index, makes the kernels of every platform on any machine: for
Linux with an old glibc, and for macOS on ARM. A wheel has kernels for all instruction sets of its
platform (`quantkit.kernels.variants`). auditwheel checks what the wheels for Linux need of a
system. `make wheels` runs this in an environment with the packages that it needs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from quantkit.kernels.build import compile_library, seal
from quantkit.kernels.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 30_000_000
# what a library shows others: nothing of its C++ library
EXPORTS = "{ global: quantkit_*; local: *; };\n"

_PROCESSOR = ("-march", "-mavx")  # with which flags of other compilers for a processor begin


@dataclass(frozen=True)
class Platform:
    """What a wheel is for.

    Attributes:
        tag: of the wheel.
        target: as Zig names it.
        processors: those of each of `VARIANTS`, as Zig names them.
    """

    tag: str
    target: str
    processors: dict[str, str]

    def commands(self, exports: Path) -> dict[str, list[str]]:
        """The compiler and its flags for each of `VARIANTS`; `exports` is a file with `EXPORTS`."""
        zig = [sys.executable, "-m", "ziglang", "c++", "-target", self.target, "-s"]
        zig += [f"-Wl,--version-script={exports}"] if "linux" in self.target else []
        return {
            name: [
                *zig,
                f"-mcpu={processor}",
                *(one for one in VARIANTS[name].flags if not one.startswith(_PROCESSOR)),
            ]
            for name, processor in self.processors.items()
        }


ARM = {"neon-dotprod": "generic+v8_2a+dotprod", "neon": "generic", "portable": "generic"}
PLATFORMS = {
    "linux-x86_64": Platform(
        "manylinux_2_17_x86_64",
        "x86_64-linux-gnu.2.17",
        {
            "avx512-bf16": "x86_64_v4+avx512vnni+avx512bf16",
            "avx512-vnni": "x86_64_v4+avx512vnni",
            "avx2": "x86_64_v3",
            "portable": "x86_64",
        },
    ),
    "linux-aarch64": Platform("manylinux_2_17_aarch64", "aarch64-linux-gnu.2.17", ARM),
    "macos-arm64": Platform("macosx_11_0_arm64", "aarch64-macos.11.0", ARM),
}


def compile_kernels(commands: dict[str, list[str]], folder: Path) -> None:
    """Compile kernels into a folder, each with a compiler and its flags."""
    folder.mkdir()
    with (
        tempfile.TemporaryDirectory(dir=folder.parent) as scratch,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        made = [Path(scratch, f"{name}.so") for name in commands]
        for library, _ in zip(
            made, pool.map(compile_library, commands.values(), made), strict=True
        ):
            seal(library, folder / library.name)


def add_kernels(pure: Path, platform: Platform, output: Path) -> Path:
    """A wheel for a platform, made from the one for any machine."""
    with tempfile.TemporaryDirectory() as scratch:
        contents, exports = Path(scratch, "contents"), Path(scratch, "exports.map")
        exports.write_text(EXPORTS)
        with zipfile.ZipFile(pure) as archive:
            archive.extractall(contents)
        compile_kernels(platform.commands(exports), contents / "quantkit" / "kernels" / "compiled")
        (facts,) = contents.glob("*.dist-info/WHEEL")
        kept = [
            line
            for line in facts.read_text().splitlines()
            if line and not line.startswith(("Tag:", "Root-Is"))
        ]
        facts.write_text(
            "\n".join([*kept, "Root-Is-Purelib: false", f"Tag: py3-none-{platform.tag}", ""])
        )
        before = set(output.iterdir())
        _run(sys.executable, "-m", "wheel", "pack", str(contents), "--dest-dir", str(output))
    (made,) = set(output.iterdir()) - before
    return made


def check(wheel: Path) -> str:
    """What auditwheel finds about a wheel.

    Exits if a system needs more than its name says, or it is too large.
    """
    if wheel.stat().st_size > MAX_BYTES:
        sys.exit(f"{wheel.name}: {wheel.stat().st_size} bytes, more than {MAX_BYTES}")
    if "linux" not in wheel.name:
        return "not checked"
    found = _run(sys.executable, "-m", "auditwheel", "show", str(wheel))
    if f'"{wheel.stem.split("-")[-1]}"' not in found:
        sys.exit(f"{wheel.name}: {' '.join(found.split())}")
    return "as auditwheel finds it"


def _run(*command: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--only", nargs="*", choices=PLATFORMS, default=list(PLATFORMS), metavar="PLATFORM"
    )
    options = parser.parse_args()
    output = options.output.resolve()
    shutil.rmtree(output, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", str(output))
    (pure,) = output.glob("*.whl")
    for name in options.only:
        add_kernels(pure, PLATFORMS[name], output)
    for made in sorted(output.iterdir()):
        print(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB, {check(made)}")


if __name__ == "__main__":
    main()
