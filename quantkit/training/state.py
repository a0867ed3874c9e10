"""The state of an interrupted training on disk, from which another run continues to the same bytes.

A state is a file for each layer, and one for what has no layer, in the safetensors format. The
journal says which files are complete.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from quantkit.formats.output.destination import not_ours
from quantkit.formats.output.staging import Staging
from quantkit.model.load import BLOCK_PREFIX
from quantkit.training.optimizer import FIRST, SECOND
from quantkit.training.training import Evaluation, State, Training

SECONDS = 300.0
"""Between two states, if no evaluation comes first."""
STATES = 3
"""On disk at a time: the last one, the best one, and one that is being written."""
_FACTOR = ".factor"
_OFFSETS = ".offsets"
_REST = "rest"
_LAST = "last"
_BEST = "best"


class SavedTraining:
    """Saves a training to the folder of an unfinished output, and restores it from there."""

    def __init__(self, training: Training, staging: Staging) -> None:
        self._training = training
        self._staging = staging
        self._saved = time.monotonic()

    def restore(self) -> None:
        """Continue where an interrupted run was. Raises `ResumeError` if its files are damaged."""
        entry = self._entry
        if entry is None:
            return
        self._restore(entry[_LAST])
        try:
            self._training.state = _state(entry["state"])
        except (LookupError, TypeError, ValueError) as error:
            raise not_ours(self._staging.path) from error

    def restore_best(self) -> None:
        """Give the model the values with the lowest KL."""
        entry = self._entry
        assert entry is not None, "the first evaluation is saved"
        self._restore(entry[_BEST])

    def save_after_evaluation(self, state: State) -> None:
        """Save after an evaluation."""
        self._save(state)

    def save_if_due(self, state: State) -> None:
        """Save after a step, if the last save is long ago."""
        if time.monotonic() - self._saved > SECONDS:
            self._save(state)

    @property
    def _entry(self) -> dict[str, Any] | None:
        if self._staging.entries:
            return self._staging.entries[-1]
        return None

    def _save(self, state: State) -> None:
        before = self._entry
        last = self._write(state.step)
        if before is None or state.best.step == state.step:
            best = last
        else:
            best = before[_BEST]
        entry = {"state": asdict(state), _LAST: last, _BEST: best}
        self._staging.record(entry)
        self._staging.entries.append(entry)
        kept = {*last, *best}
        for name in {*(before or {}).get(_LAST, ()), *(before or {}).get(_BEST, ())} - kept:
            self._staging.folder.remove(name)
        self._saved = time.monotonic()

    def _write(self, step: int) -> dict[str, str]:
        """Write a state; the sha256 of its files by name."""
        self._training.engine.fetch()
        written = {}
        for part, names in self._parts().items():
            content = save(
                {key: value for name in names for key, value in self._values(name).items()}
            )
            file = f"state-{step}-{part}.safetensors"
            self._staging.folder.write(file, content)
            written[file] = sha256(content).hexdigest()
        return written

    def _restore(self, files: Mapping[str, str]) -> None:
        for file, expected in files.items():
            with self._staging.folder.open(file, create=False) as opened:
                content = opened.read()
            if sha256(content).hexdigest() != expected:
                raise not_ours(self._staging.path / file)
            try:
                self._set(load(content))
            except (KeyError, RuntimeError, SafetensorError) as error:
                raise not_ours(self._staging.path / file) from error

    def _set(self, values: Mapping[str, Tensor]) -> None:
        model = self._training.model
        moments = self._training.engine.moments
        for key, value in values.items():
            name, _, kind = key.rpartition(".")
            if f".{kind}" == _FACTOR:
                model.factors[name].copy_(value)
            elif f".{kind}" == _OFFSETS:
                model.set_offsets(name, value.contiguous())
            else:
                moments[key].copy_(value)

    def _values(self, name: str) -> dict[str, Tensor]:
        """Return what a tensor's training consists of."""
        model = self._training.model
        moments = self._training.engine.moments
        result = {
            name + _FACTOR: model.factors[name],
            **{name + end: moments[name + end] for end in (FIRST, SECOND)},
        }
        if model.has_offsets(name):
            result[name + _OFFSETS] = model.offsets(name)
        return result

    def _parts(self) -> dict[str, list[str]]:
        """Return the trained tensors of each layer, and those of none."""
        model = self._training.model
        result: dict[str, list[str]] = {}
        for name in model.factors:
            layer = next(
                (
                    n
                    for n in range(model.config.num_layers)
                    if name.startswith(BLOCK_PREFIX.format(n))
                ),
                None,
            )
            result.setdefault(_REST if layer is None else str(layer), []).append(name)
        return result


def _state(fields: Mapping[str, Any]) -> State:
    return State(
        fields["step"],
        fields["sum"],
        fields["count"],
        [Evaluation(**one) for one in fields["curve"]],
    )
