r"""Count how many small mutations of the code the tests notice.

    python scripts/release/mutation_check.py --state /tmp/mutations.json
    python scripts/release/mutation_check.py --state /tmp/mutations.json --marker "not slow"
    python scripts/release/mutation_check.py --state /tmp/old.json --repository ../older --count 20
    python scripts/release/mutation_check.py --state /tmp/two.json --count 2 \
        --folders quantkit/solver --tests tests/solver

Draws places in `FOLDERS` with a fixed seed and one mutation for each: a comparison flipped, + and -
swapped, `and` and `or` swapped, a constant changed, `not` dropped, a returned value replaced by
None, a statement dropped. Which tests reach a place is found without a coverage tool: in a copy of
the repository each place gets a call that writes down the test now running, also from the processes
that the test starts, and the whole suite runs once. A place that is reached while a shared fixture
is made belongs to every test that uses the fixture. Then each mutation is made alone, in another
copy, and its tests run until one fails.

The repository needs its `.venv` with the tests' packages. A run that is stopped goes on where it
was if the command is repeated. With `--marker`, only the tests that pytest selects by it run on
each mutation. The state file keeps the places, the tests that reach them and the verdicts by
marker: run the command with the same state file and another marker, one after the other, to compare
a part of the suite with all of it on the same places. Places are drawn from the repository as it
is, so two versions are compared by their shares.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FOLDERS = ("solver", "formats", "text", "quality", "runtime")
SECONDS = 180
"""The time limit of the tests of one mutation."""

_NO_TESTS = 5  # the exit code of pytest where no test is selected

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


def list_mutations(node: ast.AST) -> Iterator[str]:
    """Yield the names of the mutations that a node allows."""
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


def mutate(node: ast.AST) -> ast.AST:
    """Return a changed copy of a node that `list_mutations` names a mutation for."""
    mutant = copy.deepcopy(node)
    match mutant:
        case ast.Compare(ops=[op]):
            mutant.ops = [_FLIPPED[type(op)]()]
        case ast.BinOp(op=op):
            mutant.op = ast.Sub() if isinstance(op, ast.Add) else ast.Add()
        case ast.BoolOp(op=op):
            mutant.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.UnaryOp(operand=operand):
            return operand
        case ast.Constant(value=bool() as value):
            mutant.value = not value
        case ast.Constant(value=value):
            mutant.value = value + 1  # type: ignore[operator]
        case ast.Return():
            mutant.value = ast.Constant(None)
        case _:
            return ast.Pass()
    return mutant


def find_places(root: Path, folders: Sequence[str]) -> list[Place]:
    """Return all places of the functions in some folders that can be mutated."""
    places = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            file = str(path.relative_to(root))
            function_nodes = {id(node) for node in _walk_functions(tree)}
            for number, node in enumerate(ast.walk(tree)):
                if id(node) not in function_nodes:
                    continue
                line = getattr(node, "lineno", 0)
                for mutation in list_mutations(node):
                    places.append(Place(file, line, number, mutation))
    return places


def _walk_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of functions' bodies: what runs while tests do, not while modules are
    imported.
    """
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in function.body:
            yield from _walk_expressions(statement)


def _walk_expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, but for patterns of `match`, which cannot hold a call, and
    annotations, which never run.
    """
    yield node
    for name, value in ast.iter_fields(node):
        if name == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.pattern):
                yield from _walk_expressions(child)


class _ReplaceNode(ast.NodeTransformer):
    """Put something in the place of one node."""

    def __init__(self, target: ast.AST, make: Callable[[ast.AST], Any]) -> None:
        self.target = target
        self.make = make

    def visit(self, node: ast.AST) -> Any:
        if node is self.target:
            return self.make(node)
        return super().generic_visit(node)


def rewrite_file(path: Path, changes: Mapping[int, Callable[[ast.AST], Any]]) -> None:
    """Replace nodes of a file by what their functions make of them.

    Args:
        path: the file.
        changes: functions by the number of a node in the order of `ast.walk`.
    """
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    # What is deeper has a higher number, and comes first: what is above it then still holds it.
    for number in sorted(changes, reverse=True):
        tree = _ReplaceNode(nodes[number], changes[number]).visit(tree)
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)))


def make_recorder(index: int) -> Callable[[ast.AST], Any]:
    """Return a function that lets a node run after a call that records the place `index`."""

    def record(node: ast.AST) -> Any:
        call = f"__import__('mutation_recorder').reach({index})"
        if isinstance(node, ast.stmt):
            return [ast.parse(call).body[0], node]
        nothing = ast.parse(f"({call}, None)[1]", mode="eval").body
        pair = ast.Tuple([nothing, node], ast.Load())  # type: ignore[list-item]
        return ast.Subscript(pair, ast.Constant(1), ast.Load())

    return record


def copy_repository(repository: Path, target: Path) -> Path:
    """Copy the files of a repository that Git knows, and return the folder."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listing.split("\0")):
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


def prepare_environment(root: Path, log: Path | None = None) -> dict[str, str]:
    """Write into a copy what finds its package and records, and return the environment for it.

    Args:
        root: the copy.
        log: the file that reached places are recorded in; None to record nothing.
    """
    tools = root / "mutation_tools"
    tools.mkdir(exist_ok=True)
    (root / "mutation_imports.py").write_text(_IMPORTS)
    (tools / "mutation_recorder.py").write_text(_RECORDER)
    (tools / "sitecustomize.py").write_text(
        "import importlib.util\n_spec = importlib.util.spec_from_file_location('mutation_imports', "
        f"{str(root / 'mutation_imports.py')!r})\n"
        "_spec.loader.exec_module(importlib.util.module_from_spec(_spec))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tools), "PYTHONDONTWRITEBYTECODE": "1"}
    if log is not None:
        environment["MUTATION_CHECK_LOG"] = str(log)
    return environment


def record_tests(
    repository: Path, places: Sequence[Place], tests: Sequence[str], processes: int, work: Path
) -> list[list[str]]:
    """Run the suite once in a copy that records, and return the tests that reach each place.

    Args:
        repository: the repository, which stays as it is.
        places: what is recorded.
        tests: the files or tests to run; all if there are none.
        processes: in how many processes pytest runs.
        work: the folder for the copy.

    Raises:
        SystemExit: if the copy's package is not what is imported, or the tests do not run.
    """
    root = copy_repository(repository, work / "recorded")
    log = work / "reached.jsonl"
    require_copied_package(repository, root)
    recorders: dict[str, dict[int, Callable[[ast.AST], Any]]] = {}
    for index, place in enumerate(places):
        recorders.setdefault(place.file, {})[place.number] = make_recorder(index)
    for file, changes in recorders.items():
        rewrite_file(root / file, changes)
    command = [find_python(repository), "-m", "pytest", "-q", "-p", "mutation_recorder"]
    if processes > 1:
        command += ["--numprocesses", str(processes), "--dist", "loadfile"]
    run = subprocess.run(
        [*command, *tests],
        cwd=root,
        env=prepare_environment(root, log),
        capture_output=True,
        text=True,
    )
    print(run.stdout.strip().rsplit("\n", 1)[-1], flush=True)
    if run.returncode not in (0, 1):
        sys.exit(f"the tests do not run:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    tests_by_place = read_tests(log)
    return [tests_by_place.get(index, []) for index in range(len(places))]


def read_tests(log: Path) -> dict[int, list[str]]:
    """Return the tests by the number of a place; a fixture stands for all tests that use it.

    Tests that fail without any mutation are left out.
    """
    entries = []
    if log.exists():
        entries = [json.loads(line) for line in log.read_text().splitlines()]
    users: dict[str, list[str]] = {}
    failed = set()
    reached: dict[int, set[str]] = {}
    for first, second in entries:
        if isinstance(first, int):
            reached.setdefault(first, set()).add(second)
        elif first == "failed":
            failed.add(second)
        else:
            for fixture in second:
                users.setdefault(fixture, []).append(first)
    tests_by_place = {}
    for index, names in reached.items():
        tests = {test for name in names for test in users.get(name, [name])}
        tests_by_place[index] = sorted(tests - failed - set(users))
    return tests_by_place


def require_copied_package(repository: Path, root: Path) -> None:
    """Check that the copy's package is the one that is imported.

    Raises:
        SystemExit: if it is not.
    """
    imported = subprocess.run(
        [find_python(repository), "-c", "import quantkit; print(quantkit.__file__)"],
        cwd="/",
        env=prepare_environment(root),
        capture_output=True,
        text=True,
    ).stdout.strip()
    if not imported.startswith(str(root)):
        sys.exit(
            f"the copy is not what is imported (found {imported or 'an error'}, expected a file in"
            f" {root})"
        )


def find_python(repository: Path) -> str:
    """Return the interpreter that runs a repository's tests."""
    return str(repository / ".venv" / "bin" / "python")


def judge_mutation(
    repository: Path,
    place: Place,
    tests: Sequence[str],
    work: Path,
    *,
    marker: str = "",
    seconds: float = SECONDS,
) -> str:
    """Mutate one place in a copy and return what its tests say.

    Args:
        repository: the repository, which stays as it is.
        place: what is mutated.
        tests: the tests that reach it.
        work: the folder for the copy.
        marker: the expression by which pytest selects among the tests; all if it is empty.
        seconds: the time limit of the tests.

    Returns:
        `not reached` if there is no test or the marker selects none, `time limit`, `survived` if
        all tests pass, or `caught`.
    """
    if not tests:
        return "not reached"
    with tempfile.TemporaryDirectory(dir=work) as folder:
        root = copy_repository(repository, Path(folder))
        rewrite_file(root / place.file, {place.number: mutate})
        names = root / "tests_of_the_place"
        names.write_text("\n".join(tests))
        command = [find_python(repository), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        if marker:
            command += ["-m", marker]
        try:
            run = subprocess.run(
                [*command, f"@{names}"],
                cwd=root,
                env=prepare_environment(root),
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return "time limit"
    return {0: "survived", _NO_TESTS: "not reached"}.get(run.returncode, "caught")


class State:
    """The state file: the places, the tests that reach each, and the verdicts by marker.

    A verdict is its words and the seconds that the tests took, by the number of the place as text.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.places: list[Place] = []
        self.tests: list[list[str]] | None = None
        self.verdicts: dict[str, dict[str, tuple[str, int]]] = {}
        if path.exists():
            kept = json.loads(path.read_text())
            self.places = [Place(*place) for place in kept["places"]]
            self.tests = kept["tests"]
            self.verdicts = kept["verdicts"]

    def save(self) -> None:
        """Write the file."""
        kept = {"places": self.places, "tests": self.tests, "verdicts": self.verdicts}
        self._path.write_text(json.dumps(kept, indent=1))


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20, help="number of places")
    parser.add_argument("--repository", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--folders", nargs="+", default=[f"quantkit/{name}" for name in FOLDERS])
    parser.add_argument(
        "--tests", nargs="*", default=[], help="run only these tests; by default all"
    )
    parser.add_argument(
        "--marker",
        default="",
        metavar="EXPRESSION",
        help="pytest's -m for the tests of each mutation, such as 'not slow'; the run that records"
        " is of all tests",
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="time limit of the tests of one mutation"
    )
    parser.add_argument("--workers", type=int, default=2, help="of the run that records")
    parser.add_argument(
        "--state", type=Path, required=True, help="a JSON file, written after each step"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw places, record their tests, judge each mutation, and print the verdicts."""
    options = parse_options(arguments)
    repository = options.repository.resolve()
    state = State(options.state)
    if not state.places:
        places = find_places(repository, options.folders)
        state.places = sorted(random.Random(options.seed).sample(places, options.count))
        state.save()
    verdicts = state.verdicts.setdefault(options.marker, {})
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        if state.tests is None:
            state.tests = record_tests(
                repository, state.places, options.tests, options.workers, Path(folder)
            )
            state.save()
        for index, (place, tests) in enumerate(zip(state.places, state.tests, strict=True)):
            key = str(index)
            if key not in verdicts:
                started = time.monotonic()
                verdict = judge_mutation(
                    repository,
                    place,
                    tests,
                    Path(folder),
                    marker=options.marker,
                    seconds=options.seconds,
                )
                verdicts[key] = (verdict, round(time.monotonic() - started))
                state.save()
            verdict, seconds = verdicts[key]
            print(
                f"{place.file}:{place.line}: {place.mutation}: {len(tests)} tests, {verdict},"
                f" {seconds} s",
                flush=True,
            )
    counts = Counter(verdict for verdict, _ in verdicts.values())
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))


if __name__ == "__main__":
    main()
