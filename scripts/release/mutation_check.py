r"""Counts how many small mutations of the code the tests notice.

Draws places in `FOLDERS` with a fixed seed and one mutation for each: a comparison flipped, + and -
swapped, `and` and `or` swapped, a constant changed, `not` dropped, a returned value replaced by
None, a statement dropped. Which tests reach a place is found without a coverage tool: in a copy of
the repository each place gets a call that writes down the test now running, also from the processes
that the test starts, and the whole suite runs once. A place that is reached while a shared fixture
is made belongs to every test that uses the fixture. Then each mutation is made alone, in another
copy, and its tests run until one fails.

    python scripts/release/mutation_check.py --state /tmp/mutations.json
    python scripts/release/mutation_check.py --state /tmp/old.json --repository ../older --count \
        20
    python scripts/release/mutation_check.py --state /tmp/two.json --count 2 --folders \
        quantkit/solver --tests tests/solver

The repository needs its `.venv` with the tests' packages. A run that is stopped goes on where it
was if the command is repeated. Places are drawn from the repository as it is, so two versions are
compared by their shares.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDERS = ("solver", "formats", "text", "quality", "runtime")
SECONDS = 180
"""The time limit of the tests of one mutation."""

_FLIPPED: dict[type, Callable[[], ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_RECORDER = '''"""Writes down which tests reach which place, and which shared fixtures each test uses."""

import json
import os

import pytest


def reach(place):
    now = os.environ.get("MUTATION_CHECK_NOW") or os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if now and (place, now) not in _seen:
        _seen.add((place, now))
        _write([place, now])


def _write(entry):
    line = (json.dumps(entry) + "\\n").encode()
    file = os.open(os.environ["MUTATION_CHECK_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(file, line)
    finally:
        os.close(file)


_seen = set()
_WITHIN_A_TEST = "MUTATION_CHECK_NOW" in os.environ


def _fixture(definition):
    return f"fixture {definition.baseid}::{definition.argname}"


class _Now:
    """The test or fixture now running, for this process and those that it starts."""

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.before = os.environ.get("MUTATION_CHECK_NOW")
        os.environ["MUTATION_CHECK_NOW"] = self.name

    def __exit__(self, *_):
        os.environ.pop("MUTATION_CHECK_NOW")
        if self.before is not None:
            os.environ["MUTATION_CHECK_NOW"] = self.before


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    if _WITHIN_A_TEST:
        yield
        return
    definitions = getattr(item, "_fixtureinfo").name2fixturedefs.values()
    shared = [_fixture(one) for some in definitions for one in some if one.scope != "function"]
    if shared:
        _write([item.nodeid, shared])
    with _Now(item.nodeid):
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef, request):
    if _WITHIN_A_TEST or fixturedef.scope == "function":
        yield
        return
    with _Now(_fixture(fixturedef)):
        yield


def pytest_runtest_logreport(report):
    if report.failed and not _WITHIN_A_TEST and "MUTATION_CHECK_LOG" in os.environ:
        _write(["failed", report.nodeid])
'''  # noqa: E501


class Place(NamedTuple):
    """A node of a file, by its number in the order of `ast.walk`, and what is done to it."""

    file: str
    line: int
    number: int
    mutation: str


def mutations_of(node: ast.AST) -> Iterator[str]:
    """The names of the mutations that a node allows."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _FLIPPED:
            yield "comparison flipped"
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            yield "+ and - swapped"
        case ast.BoolOp():
            yield "and, or swapped"
        case ast.UnaryOp(op=ast.Not()):
            yield "not dropped"
        case ast.Constant(value=int() | float()):
            yield "constant changed"
        case ast.Return(value=ast.AST() as value) if not (
            isinstance(value, ast.Constant) and value.value is None
        ):
            yield "returned value replaced"
        case ast.Expr(value=ast.Call()) | ast.Assign() | ast.AugAssign() | ast.Raise():
            yield "statement dropped"


def mutated(node: ast.AST) -> ast.AST:
    """A changed copy of a node that `mutations_of` names a mutation for."""
    made = copy.deepcopy(node)
    match made:
        case ast.Compare(ops=[op]):
            made.ops = [_FLIPPED[type(op)]()]
        case ast.BinOp(op=op):
            made.op = ast.Sub() if isinstance(op, ast.Add) else ast.Add()
        case ast.BoolOp(op=op):
            made.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.UnaryOp(operand=operand):
            return operand
        case ast.Constant(value=bool() as value):
            made.value = not value
        case ast.Constant(value=value):
            made.value = value + 1  # type: ignore[operator]
        case ast.Return():
            made.value = ast.Constant(None)
        case _:
            return ast.Pass()
    return made


def places_of(root: Path, folders: list[str]) -> list[Place]:
    """All places of the folders' functions that can be mutated."""
    found = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            inside = {id(node) for node in _within_functions(tree)}
            for number, node in enumerate(ast.walk(tree)):
                if id(node) in inside:
                    file, line = str(path.relative_to(root)), getattr(node, "lineno", 0)
                    found += [
                        Place(file, line, number, mutation) for mutation in mutations_of(node)
                    ]
    return found


def _within_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of functions' bodies: what runs while tests do, not while modules are imported."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                patterns = [
                    case.pattern for case in ast.walk(statement) if isinstance(case, ast.match_case)
                ]
            # Which take no calls.
            apart = {id(node) for pattern in patterns for node in ast.walk(pattern)}
            yield from (node for node in ast.walk(statement) if id(node) not in apart)


class _Change(ast.NodeTransformer):
    """Puts something in the place of one node."""

    def __init__(self, target: ast.AST, make: Callable[[ast.AST], Any]) -> None:
        self.target, self.make = target, make

    def visit(self, node: ast.AST) -> Any:
        return self.make(node) if node is self.target else super().generic_visit(node)


def _rewrite(path: Path, number: int, make: Callable[[ast.AST], Any]) -> None:
    tree = ast.parse(path.read_text())
    changed = _Change(list(ast.walk(tree))[number], make).visit(tree)
    path.write_text(ast.unparse(ast.fix_missing_locations(changed)))


def _recorded(index: int) -> Callable[[ast.AST], Any]:
    """A node that is evaluated after a call that records it."""

    def make(node: ast.AST) -> Any:
        call = f"__import__('mutation_recorder').reach({index})"
        if isinstance(node, ast.stmt):
            return [ast.parse(call).body[0], node]
        either = ast.parse(f"({call}, None)[1]", mode="eval").body
        return ast.Subscript(ast.Tuple([either, node], ast.Load()), ast.Constant(1), ast.Load())  # type: ignore[arg-type]

    return make


def _copy(repository: Path, target: Path) -> Path:
    """A copy of the repository's files that Git knows."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, names):
        if (repository / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repository / name, target / name)
    return target


_IMPORTS = '''"""Finds the package in this copy before the one that is installed."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PLACES = {"quantkit.kernels": "kernels", "quantkit.cli": "cli", "quantkit.evals": "evals", "quantkit": "quantkit"}


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in PLACES:
            folder = ROOT / PLACES[name]
            return importlib.util.spec_from_file_location(
                name, folder / "__init__.py", submodule_search_locations=[str(folder)]
            )
        return None


sys.meta_path.insert(0, Finder)
sys.path.append(str(ROOT / "mutation_tools"))
'''  # noqa: E501


def _environment(root: Path, log: Path | None = None) -> dict[str, str]:
    tools = root / "mutation_tools"
    tools.mkdir(exist_ok=True)
    (root / "mutation_imports.py").write_text(_IMPORTS)
    (tools / "mutation_recorder.py").write_text(_RECORDER)
    (tools / "sitecustomize.py").write_text(
        "import importlib.util\n_spec = importlib.util.spec_from_file_location('mutation_imports', "
        f"{str(root / 'mutation_imports.py')!r})\n"
        "_spec.loader.exec_module(importlib.util.module_from_spec(_spec))\n"
    )
    found = {**os.environ, "PYTHONPATH": str(tools), "PYTHONDONTWRITEBYTECODE": "1"}
    return found | ({"MUTATION_CHECK_LOG": str(log)} if log else {})


def _tests_by_place(
    repository: Path, places: list[Place], only: list[str], workers: int, work: Path
) -> dict[int, list[str]]:
    """The tests that reach each place, from one run of the suite."""
    root, log = _copy(repository, work / "recorded"), work / "reached.jsonl"
    _require_own_package(repository, root)
    by_file: dict[str, list[tuple[int, Place]]] = {}
    for index, place in enumerate(places):
        by_file.setdefault(place.file, []).append((index, place))
    for file, some in by_file.items():
        tree = ast.parse((root / file).read_text())
        nodes = list(ast.walk(tree))
        for index, place in sorted(some, key=lambda one: -one[1].number):  # what is deeper first
            tree = _Change(nodes[place.number], _recorded(index)).visit(tree)
        (root / file).write_text(ast.unparse(ast.fix_missing_locations(tree)))
    parallel = ["--numprocesses", str(workers), "--dist", "loadfile"] if workers > 1 else []
    command = [
        _python(repository),
        "-m",
        "pytest",
        "-q",
        "-p",
        "mutation_recorder",
        *parallel,
        *only,
    ]
    environment = _environment(root, log)
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    print(done.stdout.strip().rsplit("\n", 1)[-1], flush=True)
    if done.returncode not in (0, 1):
        sys.exit(f"the tests do not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return _tests_of(log)


def _tests_of(log: Path) -> dict[int, list[str]]:
    """Tests by the number of a place; a fixture stands for all tests that use it."""
    users: dict[str, list[str]] = {}
    failed = set()  # without any mutation
    reached: dict[int, set[str]] = {}
    for first, second in map(json.loads, log.read_text().splitlines()) if log.exists() else ():
        if isinstance(first, int):
            reached.setdefault(first, set()).add(second)
        elif first == "failed":
            failed.add(second)
        else:
            for fixture in second:
                users.setdefault(fixture, []).append(first)
    return {
        index: sorted(
            {test for name in names for test in users.get(name, [name])} - failed - set(users)
        )
        for index, names in reached.items()
    }


def _require_own_package(repository: Path, root: Path) -> None:
    """The copy's package is the one that is imported."""
    code = "import quantkit; print(quantkit.__file__)"
    command = [_python(repository), "-c", code]
    found = subprocess.run(
        command, cwd="/", env=_environment(root), capture_output=True, text=True
    ).stdout.strip()
    if not found.startswith(str(root)):
        sys.exit(
            f"the copy is not what is imported (found {found or 'an error'}, expected a file in"
            f" {root})"
        )


def _python(repository: Path) -> str:
    return str(repository / ".venv" / "bin" / "python")


def _verdict(repository: Path, place: Place, tests: list[str], work: Path) -> str:
    """What the tests of a place say about its mutation."""
    if not tests:
        return "not reached"
    with tempfile.TemporaryDirectory(dir=work) as folder:
        root = _copy(repository, Path(folder))
        _rewrite(root / place.file, place.number, mutated)
        names = root / "tests_of_the_place"
        names.write_text("\n".join(tests))
        command = [
            _python(repository),
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            f"@{names}",
        ]
        try:
            done = subprocess.run(
                command,
                cwd=root,
                env=_environment(root),
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return "time limit"
        return "survived" if done.returncode == 0 else "caught"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20, help="number of places")
    parser.add_argument("--repository", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--folders", nargs="+", default=[f"quantkit/{name}" for name in FOLDERS])
    parser.add_argument(
        "--tests", nargs="*", default=[], help="run only these tests; by default all"
    )
    parser.add_argument("--workers", type=int, default=2, help="of the run that records")
    parser.add_argument(
        "--state", type=Path, required=True, help="a JSON file, written after each step"
    )
    options = parser.parse_args()
    repository = options.repository.resolve()
    state: dict[str, Any] = json.loads(options.state.read_text()) if options.state.exists() else {}

    def save() -> None:
        options.state.write_text(json.dumps(state, indent=1))

    if not state:
        drawn = random.Random(options.seed).sample(
            places_of(repository, options.folders), options.count
        )
        state.update(places=sorted(drawn), tests=None, verdicts={})
        save()
    places = [Place(*place) for place in state["places"]]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        if state["tests"] is None:
            reached = _tests_by_place(
                repository, places, options.tests, options.workers, Path(folder)
            )
            state["tests"] = [reached.get(index, []) for index in range(len(places))]
            save()
        for index, place in enumerate(places):
            tests = state["tests"][index]
            if str(index) not in state["verdicts"]:
                begin = time.monotonic()
                verdict = _verdict(repository, place, tests, Path(folder))
                state["verdicts"][str(index)] = [verdict, round(time.monotonic() - begin)]
                save()
            verdict, seconds = state["verdicts"][str(index)]
            print(
                f"{place.file}:{place.line}: {place.mutation}: {len(tests)} tests, {verdict},"
                f" {seconds} s",
                flush=True,
            )
    counts = Counter(verdict for verdict, _ in state["verdicts"].values())
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))


if __name__ == "__main__":
    main()
