"""Save the state of a training on disk, from which another run continues to the same bytes.

A state is a file for each layer, and one for tensors without a layer, in the safetensors format.
The journal lists the complete files.
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

from quantkit.formats.output.destination import build_not_ours_error
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
        """Continue from the last state of an interrupted run. Raises `ResumeError` if its files
        are damaged.
        """
        entry = self._entry
        if entry is None:
            return
        self._restore(entry[_LAST])
        try:
            self._training.state = _state(entry["state"])
        except (LookupError, TypeError, ValueError) as error:
            raise build_not_ours_error(self._staging.path) from error

    def restore_best(self) -> None:
        """Restore the values with the lowest KL into the model."""
        entry = self._entry
        assert entry is not None, "the first evaluation is saved"
        self._restore(entry[_BEST])

    def save_after_evaluation(self, state: State) -> None:
        """Save after an evaluation."""
        self._save(state)

    def save_if_due(self, state: State) -> None:
        """Save after a step, if the last save was more than `SECONDS` ago."""
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
        # Files of the state before are removed only after the journal lists the new ones, so that
        # an interrupted run always finds a complete state.
        self._staging.record(entry)
        self._staging.entries.append(entry)
        if before is not None:
            obsolete = {*before.get(_LAST, ()), *before.get(_BEST, ())} - {*last, *best}
            for name in obsolete:
                self._staging.folder.remove(name)
        self._saved = time.monotonic()

    def _write(self, step: int) -> dict[str, str]:
        """Write a state, and return the sha256 of its files by name."""
        # Some engines keep the values on devices.
        self._training.engine.fetch()
        hashes: dict[str, str] = {}
        for part, names in self._parts().items():
            values: dict[str, Tensor] = {}
            for name in names:
                values |= self._values(name)
            content = save(values)
            file = f"state-{step}-{part}.safetensors"
            self._staging.folder.write(file, content)
            hashes[file] = sha256(content).hexdigest()
        return hashes

    def _restore(self, files: Mapping[str, str]) -> None:
        for file, expected in files.items():
            with self._staging.folder.open(file, create=False) as opened:
                content = opened.read()
            # The journal is complete, but the file may have been changed or truncated since.
            if sha256(content).hexdigest() != expected:
                raise build_not_ours_error(self._staging.path / file)
            try:
                self._set(load(content))
            except (KeyError, RuntimeError, SafetensorError) as error:
                raise build_not_ours_error(self._staging.path / file) from error

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
        """Collect the values of a tensor's training: its factor, moments and offsets."""
        model = self._training.model
        moments = self._training.engine.moments
        values = {
            name + _FACTOR: model.factors[name],
            name + FIRST: moments[name + FIRST],
            name + SECOND: moments[name + SECOND],
        }
        if model.has_offsets(name):
            values[name + _OFFSETS] = model.offsets(name)
        return values

    def _parts(self) -> dict[str, list[str]]:
        """Group the trained tensors by layer, and those without a layer as `_REST`."""
        num_layers = self._training.model.config.num_layers
        parts: dict[str, list[str]] = {}
        for name in self._training.model.factors:
            parts.setdefault(_layer_of(name, num_layers), []).append(name)
        return parts


def _layer_of(name: str, num_layers: int) -> str:
    """Find the layer of a tensor, as part of a file's name."""
    for layer in range(num_layers):
        if name.startswith(BLOCK_PREFIX.format(layer)):
            return str(layer)
    return _REST


def _state(fields: Mapping[str, Any]) -> State:
    curve = [Evaluation(**evaluation) for evaluation in fields["curve"]]
    return State(fields["step"], fields["sum"], fields["count"], curve)
