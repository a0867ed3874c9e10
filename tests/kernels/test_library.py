"""Which CPU kernels are loaded: those that come with quantkit, those that are compiled here, or
none.
"""

from __future__ import annotations

import copy
import os
import pickle
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from build_wheels import compile_kernels
from error_parts import raises
from instruction_sets import HERE
from quick_compiler import quick_compiler

from quantkit.errors import UnsupportedError
from quantkit.kernels.build import ensure_compiled
from quantkit.kernels.library import describe_kernels, load_kernels
from quantkit.kernels.variants import VARIANTS, runs_here

pytestmark = pytest.mark.cpu_kernels

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="torch knows the features of x86-64 only"
)
def test_the_instruction_sets_of_this_machine_are_those_that_torch_finds() -> None:
    found = torch.backends.cpu.get_cpu_capability()
    assert runs_here("portable")
    assert runs_here("avx2") == (found in ("AVX2", "AVX512"))
    assert not runs_here("avx512-vnni") or found == "AVX512"
    assert not runs_here("neon")


@pytest.mark.parametrize("name", HERE)
def test_kernels_say_which_instructions_they_use(name: str) -> None:
    assert load_kernels(name).instructions() == name


def test_kernels_for_other_processors_are_not_loaded() -> None:
    (other,) = {"neon", "avx2"} - set(HERE) or {"neon"}
    with raises(UnsupportedError, other):
        load_kernels(other)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """quantkit as a wheel installs it, with two libraries, one of them the best for this
    machine.
    """
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "quantkit", folder / "quantkit")
    for package in ("kernels", "cli", "evals"):
        shutil.copytree(ROOT / package, folder / "quantkit" / package)
    names = {HERE[0], "portable"}
    commands = {
        name: [str(quick_compiler(name, folder / f"c++-{name}")), *VARIANTS[name].flags]
        for name in names
    }
    compile_kernels(commands, folder / "quantkit" / "kernels" / "compiled")
    return folder


@pytest.fixture
def on_path(tmp_path: Path) -> dict[str, str]:
    """An environment whose cache is empty, and whose only compiler, a quick one, is found on
    ``PATH``.
    """
    quick_compiler("native", tmp_path / "bin" / "c++")
    return {"PATH": str(tmp_path / "bin"), "QUANTKIT_CACHE": str(tmp_path / "cache")}


def _loaded(installed: Path, **environment: str) -> str:
    code = (
        "import torch\n"
        "from quantkit.kernels.library import describe_kernels, load_kernels\n"
        "before = describe_kernels()\n"
        "found = load_kernels()\n"
        "from quantkit.tensors.qtensor import QuantTensor\n"
        "from quantkit.tensors.scheme import QuantScheme\n"
        "codes = torch.full((20, 64), 129, dtype=torch.uint8)\n"
        "weight = QuantTensor(codes, torch.ones(20, 1), None, QuantScheme(8, None))\n"
        "packed = found.pack([weight], 20, exact=True)\n"
        "right = found.linear(torch.ones(3, 64), packed, None, 20).eq(64).all()\n"
        "print('; '.join([before, describe_kernels(), 'right' if right else 'wrong']))\n"
    )
    clean = {
        "PYTHONPATH": str(installed),
        "HOME": "/nowhere",
        "PATH": "/nowhere",
        "QUANTKIT_CACHE": "/nowhere/cache",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**clean, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.compiles
def test_kernels_that_come_with_quantkit_need_no_compiler_and_no_cache(installed: Path) -> None:
    assert _loaded(installed) == f"{HERE[0]}, included; {HERE[0]}, included; right"
    assert (
        _loaded(installed, QUANTKIT_CPU="portable")
        == "portable, included; portable, included; right"
    )


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.skipif(HERE == ["portable"], reason="there is no other library")
def test_a_library_that_is_damaged_or_another_is_not_loaded(
    installed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(installed, folder)
    best, other = (
        folder / "quantkit" / "kernels" / "compiled" / name for name in (HERE[0], "portable")
    )
    whole = best.with_suffix(".so").read_bytes()
    best.with_suffix(".so").write_bytes(whole[: len(whole) // 2])
    assert _loaded(folder) == "portable, included; portable, included; right"
    for suffix in (".so", ".sha256"):
        shutil.copy(other.with_suffix(suffix), best.with_suffix(suffix))
    assert (
        f"the library was compiled for other instructions (found portable, expected {HERE[0]})"
        in _loaded(folder)
    )


@pytest.mark.slow
@pytest.mark.compiles
def test_a_damaged_library_in_the_cache_is_compiled_again(
    installed: Path, on_path: dict[str, str]
) -> None:
    here = {**on_path, "QUANTKIT_CPU": "native"}
    assert _loaded(installed, **here).endswith("native, compiled; right")
    (library,) = Path(here["QUANTKIT_CACHE"]).glob("*.so")
    library.write_bytes(library.read_bytes()[:5000])
    assert _loaded(installed, **here) == "native, not compiled yet; native, compiled; right"


def _own_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    compiler = folder / "c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("QUANTKIT_CACHE", str(folder / "cache"))


def test_what_a_killed_process_left_in_the_cache_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _own_compiler(
        monkeypatch,
        tmp_path,
        'while [ "$#" -gt 1 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done',
    )
    library = ensure_compiled("portable")
    library.unlink()
    left, other = library.with_suffix(".killed"), library.parent / "quantkit-portable-other.running"
    for folder in (left, other):
        folder.mkdir()
        (folder / "made.so").touch()
    assert ensure_compiled("portable") == library
    assert library.is_file()
    assert other.exists() > left.exists()


def test_a_full_disk_is_not_blamed_on_the_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full = (
        '[ "$1" = -E ] || [ "$2" = -E ] || { echo "fatal error: No space left on device" >&2; exit'
        " 1; }"
    )
    _own_compiler(monkeypatch, tmp_path, full)
    with raises(UnsupportedError, "No space left on device", "QUANTKIT_CACHE") as caught:
        ensure_compiled("portable")
    assert "CXX" not in str(caught.value)


def test_copies_of_kernels_are_the_same() -> None:
    kernels = load_kernels()
    assert copy.deepcopy(kernels) is pickle.loads(pickle.dumps(kernels)) is kernels


@pytest.mark.slow
@pytest.mark.compiles
def test_kernels_that_did_not_come_with_quantkit_are_compiled(
    installed: Path, on_path: dict[str, str]
) -> None:
    assert (
        _loaded(installed, QUANTKIT_CPU="native", **on_path)
        == "native, not compiled yet; native, compiled; right"
    )
    assert "there is no C++ compiler" in _loaded(installed, QUANTKIT_CPU="native")


@pytest.mark.compiles
def test_the_demo_compiles_them_while_it_does_other_things(
    installed: Path, on_path: dict[str, str]
) -> None:
    code = (
        "import sys; from quantkit.kernels.library import compile_ahead, describe_kernels\n"
        # A fast compiler may be done right after the start.
        "described = describe_kernels(); thread = compile_ahead();"
        " print('torch' in sys.modules, described, flush=True); thread.join()\n"
    )
    environment = {**os.environ, **on_path, "PYTHONPATH": str(installed), "QUANTKIT_CPU": "native"}
    environment.pop("CXX", None)
    found = subprocess.check_output(
        [sys.executable, "-c", code], env=environment, cwd="/", text=True, timeout=600
    )
    assert found == "False native, not compiled yet\n"
    assert len(list(Path(on_path["QUANTKIT_CACHE"]).glob("*.so"))) == 1


def test_the_reason_why_there_are_no_kernels_is_described(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("QUANTKIT_CPU", "native")
    assert describe_kernels().startswith("none: /nowhere/c++: ")
    monkeypatch.setenv("QUANTKIT_CPU", "sse9")
    assert describe_kernels().startswith("none: ")
    assert "found sse9" in describe_kernels()
