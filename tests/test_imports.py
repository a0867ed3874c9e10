"""Imports point one way, and importing does nothing heavy."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import rooms
from paths import ROOT

import quantkit

FOLDERS = {
    "quantkit": "quantkit",
    "kernels": "quantkit.kernels",
    "cli": "quantkit.cli",
    "evals": "quantkit.evals",
}

RANKS = {room.name: rank for rank, level in enumerate(rooms.ROOMS) for room in level}
NO_TORCH = {
    "quantkit",
    "quantkit.errors",
    "quantkit.base.json_values",
    "quantkit.base.arguments",
    "quantkit.architectures",
    "quantkit.tensors.scheme",
    "quantkit.tensors.recipe",
    "quantkit.text.convert_library_errors",
    "quantkit.text.tokenizer",
    "quantkit.formats.manifest",
    "quantkit.tensors.spec",
    "quantkit.files.source",
    "quantkit.files.pickles",
    "quantkit.files.pth_io",
    "quantkit.files.safetensors_io",
    "quantkit.formats.detect",
    "quantkit.formats.folder",
    "quantkit.formats.registry",
    "quantkit.jobs.inspect",
    "quantkit.calibration.effort",
    "quantkit.runtime.generation_config",
    "quantkit.text.chat",
}

# What headers are read with, and what all commands are parsed with: importing these imports nothing
# heavy either.
LIGHT = (
    "quantkit.jobs.inspect",
    "quantkit.cli.main",
    "quantkit.formats.detect",
    "quantkit.formats.folder",
    "quantkit.formats.manifest",
    "quantkit.text.export",
    "quantkit.tensors.recipe",
    "quantkit.doctor.diagnose",
    "quantkit.kernels.library",
    "quantkit.serve.remote_chat",
)
HEAVY = {"torch", "numpy", "datasets", "huggingface_hub", "tokenizers", "sentencepiece", "tiktoken"}

# Loaded by their backend alone, and only where it may serve.
TRITON_PARTS = "attention block experts gemm gptq linear projections qkv skinny tune words"
NEEDS_TRITON = {f"quantkit.kernels.triton_{part}" for part in TRITON_PARTS.split()}


XLA = "quantkit.xla"
XLA_LIGHT = {XLA, f"{XLA}.split"}  # what can be imported where there is no jax


# Runs a command line, and writes the names of the package's modules that it imported to a file.
_LIST_MODULES = """
import atexit, pathlib, sys

listed = pathlib.Path(sys.argv.pop(1))

def list_modules():
    names = [name for name in sys.modules if name.partition(".")[0] == "quantkit"]
    listed.write_text(" ".join(names))

atexit.register(list_modules)
from quantkit.cli.entry import main
main()
"""


def _modules() -> dict[str, ast.Module]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text(), str(path))
    return found


MODULES = _modules()


def _imports(tree: ast.Module, *, first: bool = False) -> set[str]:
    """What a module imports; with `first` only what it imports as soon as it is imported itself."""
    names: set[str] = set()
    for node in _at_once(tree) if first else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _at_once(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported: not the bodies of functions, nor what is for types
    only.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _at_once(child)


def _reached(start: str) -> dict[str, str]:
    """All that importing a module imports, and by which module of ours each is first imported."""
    found, waiting = {start: start}, [start]
    while waiting:
        module = waiting.pop()
        names = _imports(MODULES[module], first=True)
        for name in names | {name.rpartition(".")[0] for name in (*names, module) if "." in name}:
            if name not in found:
                found[name] = module
                if name in MODULES:
                    waiting.append(name)
    return found


def _room(module: str) -> str:
    """The room of a module: a folder, or a folder in one that has a rank of its own."""
    parts = module.split(".")
    inner = ".".join(parts[1:3])
    return inner if inner in RANKS else parts[1]


def _rooms(names: set[str]) -> set[str]:
    return {_room(n) for n in names if n.startswith("quantkit.") and _room(n) in RANKS}


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"quantkit"}))
def test_imports_point_only_to_rooms_above(module: str) -> None:
    room = _room(module)
    below = {other for other in _rooms(_imports(MODULES[module])) if RANKS[other] > RANKS[room]}
    assert not below


@pytest.mark.parametrize("prefix", rooms.ONLY)
def test_guarded_rooms_import_only_what_they_may(prefix: str) -> None:
    for module, tree in MODULES.items():
        if module == prefix or module.startswith(prefix + "."):
            assert _rooms(_imports(tree)) <= rooms.ONLY[prefix], module


def _imported_modules(tree: ast.Module) -> set[str]:
    """Return quantkit's modules that a module imports, also in functions and for type checkers.

    `from package import module` counts as an import of the module alone, as `package.__init__` may
    name modules that import it.
    """
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                if submodule in MODULES:
                    modules.add(submodule)
                elif node.module:
                    modules.add(node.module)
    return modules & set(MODULES)


def _find_circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of a graph that have more than one node."""
    reached = {start: _reachable(graph, start) for start in graph}
    circles = set()
    for node in graph:
        circle = frozenset(other for other in reached[node] if node in reached[other])
        if len(circle) > 1:
            circles.add(circle)
    return sorted(sorted(circle) for circle in circles)


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Return the nodes to which a path of at least one edge leads from a node."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def test_a_plain_quantization_loads_no_training() -> None:
    """`refine=True` imports the second job when it runs."""
    reached = set(_reached("quantkit.jobs.quantize.quantize")) & set(MODULES)
    training = {
        name for name in reached if name.startswith(("quantkit.training", "quantkit.jobs.refine"))
    }
    assert training == {"quantkit.jobs.refine", "quantkit.jobs.refine.options"}


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert _find_circles(graph) == [["a", "b", "c"], ["d", "e"]]
    assert not _find_circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not _find_circles({name: _imported_modules(tree) for name, tree in MODULES.items()})


def test_the_architecture_page_lists_the_rooms() -> None:
    """`python scripts/release/rooms.py --write` updates the page."""
    page = rooms.PAGE.read_text(encoding="utf-8")
    assert page == rooms.update_page(page)


def test_what_is_imported_of_ours_is_there() -> None:
    """Also within functions, where a name that has moved is missed only by whoever calls them."""
    for module, tree in MODULES.items():
        wanted = {
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
        }
        assert not {name for name in wanted if name.startswith("quantkit")} - set(MODULES), module


def test_every_module_belongs_to_a_room() -> None:
    assert {_room(m) for m in MODULES if "." in m} == set(RANKS)


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert sorted(listed) == sorted(found)


@pytest.mark.parametrize("package", ["click", "prompt_toolkit", "tqdm"])
def test_the_terminal_is_for_the_command_line_only(package: str) -> None:
    users = {m for m, tree in MODULES.items() if package in _imports(tree)}
    assert users
    assert all(m.startswith("quantkit.cli") for m in users)


def test_the_library_does_not_print() -> None:
    for module, tree in MODULES.items():
        calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
        assert not [c for c in calls if isinstance(c, ast.Name) and c.id == "print"], module


@pytest.mark.parametrize(
    ("package", "room"), [("transformers", "via_transformers"), ("greenlet", "passes")]
)
def test_transformers_and_greenlet_are_used_in_one_room_each(package: str, room: str) -> None:
    users = [
        m for m, tree in MODULES.items() if any(n.split(".")[0] == package for n in _imports(tree))
    ]
    assert users
    assert all(module.startswith(f"quantkit.{room}.") for module in users)


@pytest.mark.slow
def test_jax_is_requested_in_one_room_and_torchax_in_one_module() -> None:
    def users(package: str) -> set[str]:
        return {
            m
            for m, tree in MODULES.items()
            if any(n.split(".")[0] == package for n in _imports(tree))
        }

    assert users("torchax") == {f"{XLA}.bridge"}
    assert users("jax")
    assert all(module.startswith(XLA + ".") and module not in XLA_LIGHT for module in users("jax"))


def test_one_module_knows_whether_torch_has_a_process_group() -> None:
    users = {
        m
        for m, tree in MODULES.items()
        if any(n.startswith("torch.distributed") for n in _imports(tree))
    }
    assert users == {"quantkit.distributed.group"}


def test_only_jobs_import_the_xla_room() -> None:
    users = {
        module for module, tree in MODULES.items() if any(n.startswith(XLA) for n in _imports(tree))
    }
    assert users
    assert {_room(module).split(".")[0] for module in users} == {"xla", "jobs"}


def test_the_light_modules_do_without_torch() -> None:
    for module in {m for m in MODULES if m in NO_TORCH or m.startswith("quantkit.architectures.")}:
        assert not {n for n in _imports(MODULES[module]) if n.split(".")[0] == "torch"}, module


@pytest.mark.parametrize("module", LIGHT)
def test_what_reads_headers_imports_torch_only_where_it_loads_tensors(module: str) -> None:
    reached = _reached(module)
    assert {"quantkit.tensors.dtypes", "quantkit.errors"} & set(reached)
    assert not {name: reached[name] for name in HEAVY & set(reached)}


@pytest.mark.slow
def test_importing_everything_touches_no_accelerator_and_no_compiler() -> None:
    needs_jax = {module for module in MODULES if module.startswith(XLA) and module not in XLA_LIGHT}
    names = sorted(set(MODULES) - {"quantkit.cli.__main__"} - NEEDS_TRITON - needs_jax)
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\nimport"
        " torch\nheavy = {'triton', 'jax', 'torchax', 'transformers', 'torch._inductor',"
        " 'torch.utils.cpp_extension',\n         'datasets', 'pyarrow', 'pandas',"
        " 'huggingface_hub', 'lm_eval', 'matplotlib'}\nassert not heavy & set(sys.modules), heavy"
        " & set(sys.modules)\nassert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


@pytest.mark.slow
def test_no_test_file_imports_from_another() -> None:
    """Each can be run, moved and changed alone; what several share is in tests/support."""
    importing = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in _imports(ast.parse(path.read_text(), str(path))):
            if name.split(".")[-1].startswith("test_") or name.startswith("test_"):
                importing.append(f"{path.relative_to(ROOT)}: {name}")
    assert importing == []


def _run_command(tmp_path: Path, *arguments: str | Path) -> int:
    """Run a command in a new process, and return the number of the package's modules it imported.
    A server is ended by Ctrl-C as soon as it listens.
    """
    listed = tmp_path / "modules.txt"
    command = [sys.executable, "-c", _LIST_MODULES, listed, *arguments]
    with subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        if arguments[0] == "serve":
            assert "http://" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert listed.is_file(), errors
    return len(listed.read_text().split())


def test_commands_import_no_more_modules_than_they_need(demo_model: Path, tmp_path: Path) -> None:
    """A failure means that a command imports what only other commands, models or options need; see
    `quantkit.base.late`.
    """
    source, quantized = tmp_path / "source", tmp_path / "quantized"
    quantkit.convert(demo_model, source, to="hf")
    options = ["--scheme", "int4-g32", "--samples", "8", "--length", "64", "--device", "cpu"]
    on_cpu = ["--device", "cpu", "--backend", "cpu-exact"]
    counts = {
        "--help": _run_command(tmp_path, "--help"),
        "quantize": _run_command(tmp_path, "quantize", source, quantized, *options),
        "generate": _run_command(
            tmp_path, "generate", quantized, "Once", "--max-new-tokens", "2", *on_cpu
        ),
        "serve": _run_command(tmp_path, "serve", quantized, "--port", "0", *on_cpu),
    }
    assert set(counts) == set(rooms.MODULE_LIMITS)
    exceeded = {name: count for name, count in counts.items() if count > rooms.MODULE_LIMITS[name]}
    assert not exceeded, f"{counts}, limits {rooms.MODULE_LIMITS}"


def test_late_modules_are_there() -> None:
    """Their names are strings, which neither type checkers nor an import reads."""
    late_classes = ("LateModule", "LateFunction")
    places = set()
    for tree in MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in late_classes:
                places.add(ast.literal_eval(node.args[0]))
    assert places
    for place in places - {"torch"}:
        module, _, function = place.partition(":")
        assert module in MODULES
        defined = {getattr(node, "name", None) for node in MODULES[module].body}
        assert not function or function in defined, place
