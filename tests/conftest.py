"""Settings and fixtures that many tests share."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from quantkit.cli import hints

_ROOT = Path(__file__).resolve().parent.parent
# The checkout's bare folders must not stand in for other packages of their names.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT]


# A message that names an option which the running command does not have fails its test.
hints.strict = True


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _demo_tokenizer_exported_once() -> Iterator[None]:
    """Half the time of converting the demo model goes into its ``tokenizer.json``, which is the
    same each time: the jobs of a file make it once.
    """
    from quantkit.data.files import DEMO_MODEL
    from quantkit.formats.containers import hf

    export, demo = hf.export.export_json, (DEMO_MODEL / "tokenizer.model").read_bytes()

    @functools.cache
    def exported() -> dict[str, bytes] | None:
        with tempfile.TemporaryDirectory() as scratch:
            return export(DEMO_MODEL / "tokenizer.model", Path(scratch))

    def made(path: Path, scratch: Path) -> dict[str, bytes] | None:
        found = exported() if path.read_bytes() == demo else export(path, scratch)
        return found and dict(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf.export, "export_json", made)
        yield


@pytest.fixture(autouse=True, scope="session")
def _disks_are_not_waited_for() -> Iterator[None]:
    """No test cuts the power: what is to reach the disk only has to be open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: os.fstat(file) and None)
        yield


# A background shell ignores SIGINT, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What these say about the terminal and pytest of the caller must not reach the commands that tests
# run.
for _name in ("PYTEST_ADDOPTS", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
    os.environ.pop(_name, None)

# On matrices as small as these, threads cost more than they bring; also in the processes that tests
# start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["QUANTKIT_BF16"] = "0"  # results that do not depend on the processor
ENVIRONMENT = dict(os.environ)
SET_BY_LIBRARIES = {"HF_XET_HIGH_PERFORMANCE", "TORCHINDUCTOR_CACHE_DIR"}

LONGEST = (
    "triton_interpreter",
    "xla",
    "tensor_parallel",
    "triton_kernels",
    "architectures",
    "readme",
    "plan",
    "image_text",
    "via_transformers",
    "fuzz",
    "cpu_kernels",
    "xla_batch",
    "engine",
    "batch",
    "fused",
    "demo",
    "calibrated_experts",
    "gate",
    "captured",
    "bench",
    "calibration",
    "without_kernels",
    "quantized_families",
    "processors",
    "stacks",
    "chat_command",
    "resume",
)
"""Files that begin first: where files run at the same time, none of these is then left to run
alone at the end.
"""


def _mark_unsampled_cases_slow(items: list[pytest.Item]) -> None:
    """Mark as slow all cases of a test with ``sampled(count)`` but `count`, evenly spaced."""
    cases_by_test: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        name = getattr(item, "originalname", item.name)
        cases_by_test.setdefault((item.path, name), []).append(item)
    for cases in cases_by_test.values():
        marker = cases[0].get_closest_marker("sampled")
        if marker is None:
            continue
        (count,) = marker.args
        sampled = {index * len(cases) // count for index in range(count)}
        for index, case in enumerate(cases):
            if index not in sampled:
                case.add_marker(pytest.mark.slow)


# Before the built-in hook, which selects by marker.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _mark_unsampled_cases_slow(items)
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Refuse modules that change the environment of all tests; spare the collector of garbage those
    imported.

    They are most objects and stay: a tenth of all the time.
    """
    changed = {
        name
        for name, _ in os.environ.items() ^ ENVIRONMENT.items()
        if not name.startswith("PYTEST")
    }
    if changed := changed - SET_BY_LIBRARIES:
        raise pytest.UsageError(f"the import of a test changed the environment: {sorted(changed)}")
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def without_kernels(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A machine that has no kernels and cannot compile them; processes that the test starts
    inherit it.
    """
    from quantkit.kernels import dispatch, library
    from quantkit.model.column_kernels import select_column_kernels

    empty = str(tmp_path_factory.mktemp("empty"))
    monkeypatch.setenv("QUANTKIT_CACHE", empty)
    monkeypatch.setenv("PATH", empty)
    monkeypatch.setenv("QUANTKIT_CPU", "native")
    monkeypatch.delenv("CXX", raising=False)
    dispatch._warned.clear()
    for found in (library._load_once, select_column_kernels):
        found.cache_clear()
    yield
    for found in (library._load_once, select_column_kernels):
        found.cache_clear()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The small trained Meta checkpoint that ships with the package."""
    from quantkit.data.files import DEMO_MODEL

    return DEMO_MODEL


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a tiny random model of an architecture of transformers, by its ``model_type``; the same
    folder each time, which no test changes.
    """
    folder = tmp_path_factory.mktemp("tiny")

    @functools.cache
    def made(model_type: str) -> Path:
        import oracle  # which lets transformers be quiet
        from tiny_architectures import make

        assert oracle
        with warnings.catch_warnings(action="ignore"):
            make(model_type, folder / model_type)
        return folder / model_type

    return made


@pytest.fixture(scope="session")
def tiny_image_text_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The same of an architecture for images and text."""
    folder = tmp_path_factory.mktemp("image-text")

    @functools.cache
    def made(model_type: str) -> Path:
        import oracle
        from tiny_image_text import make

        assert oracle
        make(model_type, folder / model_type)
        return folder / model_type

    return made


@pytest.fixture(scope="session")
def real_shape(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes a tiny model with the widths and the tokenizer of a published
    one, by its name in `real_shapes.SHAPES`; the same folder each time, which no test changes.
    """
    folder = tmp_path_factory.mktemp("real-shapes")

    @functools.cache
    def make(name: str) -> Path:
        from real_shapes import make_model

        return make_model(folder / name, name)

    return make


@pytest.fixture(scope="session")
def hybrid(tiny_model: Callable[[str], Path]) -> Path:
    """A tiny Jamba, with state spaces and experts, for which there is no decoder here."""
    return tiny_model("jamba")


@pytest.fixture(scope="session")
def hybrid_int4(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in int4, calibrated and measured by transformers."""
    import quantkit

    dst = tmp_path_factory.mktemp("hybrid") / "jamba-int4"
    return quantkit.quantize(hybrid, dst, "int4-g32", samples=32, source_check=False).path
