"""The options of `refine`, which the command, the Python call, the plan and the manifest read
here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.base.arguments import as_integer, as_path, as_seed, as_string, require_flags
from quantkit.base.json_values import format_value
from quantkit.base.messages import Message, Option
from quantkit.base.option_fields import COLUMN_HELP, TEXT_HELP, option
from quantkit.calibration.effort import SAMPLES, SEED
from quantkit.errors import RequestError

if TYPE_CHECKING:
    import torch

BATCH = 4
"""Samples of a step by default."""
XLA = "xla"
EPOCHS = 4
"""Passes over the samples by default."""
TRAINING = "Training"
CALIBRATION = "Calibration text"
CHECKS = "Checks"
OUTPUT = "Output"


def mesh_shape(mesh: str | None) -> tuple[int, int] | None:
    """Parse the sizes of the axes "data" and "model"; None for None.

    Raises `RequestError` if it is no shape.
    """
    if mesh is None:
        return None
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", as_string("mesh", mesh))
    if match is None:
        raise RequestError(
            Message(Option("mesh"), " is not a valid shape"),
            found=format_value(mesh),
            expected="DxM, such as 2x4",
        )
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class RefineOptions:
    """The options of `refine`; None and False where nothing was requested.

    Attributes:
        src: a quantized model: a folder of quantkit's, GPTQ, AWQ, compressed-tensors or MLX, or a
            GGUF file, with codes of 4 or 8 bits whose groups have scales in floats.
        dst: the folder to make, or a file ``*.gguf``, in the format of `src`; it must not exist.
            None with `delta`.
        against: the float model that `src` was made from.
        delta: a file to make instead of `dst`, with the changed tensors alone; see `apply_delta`.
        train_codes: also train the codes, which stay as they are by default.
        train_norms: also train the weights of norms.
        batch: samples of a step, 4 by default.
        epochs: passes over the samples, 4 by default.
        calibration, text_column, samples, length, seed: the text, as in `quantize`; ``self`` is
            text that `against` writes. An eighth of the samples is held back, and decides which
            step's result is kept.
        activation_memory: bytes of states and codes kept in memory, as in `quantize`.
        device: where the model is trained, as torch spells it; None is a GPU if there is one.
        mesh: of several processes, or of the devices of XLA: how many have other samples, and how
            many share the model, such as ``2x4``; by default all of them share the model.
        backend: ``xla`` trains on the devices that JAX finds, in the shape of `mesh`; None is
            torch.
        accept_quality_loss: keep a result that does not pass the gate; one that is no better than
            `src` is not kept.
        source_check, resume: as in `convert`.
    """

    src: str | Path
    dst: str | Path | None = None
    _: KW_ONLY
    against: str | Path
    delta: str | Path | None = option(
        OUTPUT,
        "Write only the changed tensors, to this file; see apply-delta.",
        "path",
        metavar="FILE",
    )
    train_codes: bool = option(
        TRAINING, "Also train the quantized weights. Default: only scales.", bool, default=False
    )
    train_norms: bool = option(TRAINING, "Also train the norm weights.", bool, default=False)
    batch: int | None = option(TRAINING, f"Batch size. Default: {BATCH}.", int)
    epochs: int | None = option(TRAINING, f"Number of epochs. Default: {EPOCHS}.", int)
    calibration: str | Path | Iterable[object] | None = option(CALIBRATION, TEXT_HELP, "file")
    text_column: str | None = option(CALIBRATION, COLUMN_HELP, metavar="NAME")
    samples: int | None = option(CALIBRATION, f"Number of samples. Default: {SAMPLES}.", int)
    length: int | None = option(
        CALIBRATION, "Number of tokens per sample. Default: by the model's width.", int
    )
    seed: int | None = option(
        CALIBRATION,
        f"Random seed for the positions of the samples in the text. Default: {SEED}.",
        int,
    )
    activation_memory: int | None = option(
        TRAINING,
        "Memory for states and quantized weights; the rest goes to the output's disk. Default: as"
        " in quantize.",
        "memory",
        metavar="AMOUNT",
        changes_result=False,
    )
    device: str | torch.device | None = option(TRAINING, changes_result=False)
    mesh: str | None = option(
        TRAINING,
        "Data-parallel (D) by model-parallel (M) torchrun processes or XLA devices. Default: 1xN.",
        metavar="DxM",
        changes_result=False,
    )
    backend: str | None = option(
        TRAINING,
        "xla: train with JAX, such as on TPU chips. Default: torch.",
        choices=(XLA,),
        changes_result=False,
    )
    accept_quality_loss: bool = option(
        CHECKS,
        "Keep a result that improves on QUANTIZED but still fails the gate.",
        bool,
        default=False,
    )
    source_check: bool = option(CHECKS, default=True, changes_result=False)
    resume: bool = option(OUTPUT, default=False, changes_result=False)

    def __post_init__(self) -> None:
        """Raise a `RequestError` for a value of the wrong type or out of range, and unless there is
        one of `dst` and `delta`.
        """
        names = ("train_codes", "train_norms", "accept_quality_loss", "source_check", "resume")
        require_flags(**{name: getattr(self, name) for name in names})
        # Exactly one of the two is the output.
        if (self.dst is None) == (self.delta is None):
            if self.dst is not None:
                outputs = "both"
            else:
                outputs = "neither"
            raise RequestError(
                Message("expected either a destination or ", Option("delta")),
                found=outputs,
                expected="one of them",
            )
        for name in ("batch", "epochs", "samples", "length"):
            value = getattr(self, name)
            if value is not None:
                as_integer(name, value, 1)
        if self.seed is not None:
            as_seed("seed", self.seed)
        if self.text_column is not None and self.calibration is None:
            raise RequestError(Message(Option("text_column"), " requires ", Option("calibration")))
        if self.backend not in (None, XLA):
            raise RequestError(
                Message("unknown ", Option("backend")),
                found=format_value(self.backend),
                expected=XLA,
            )
        if self.backend is not None and self.train_codes:
            raise RequestError(
                Message(
                    Option("train_codes"),
                    " cannot be combined with ",
                    Option("backend", value="xla"),
                )
            )
        # JAX, not torch, chooses the devices of XLA.
        if self.backend is not None and self.device is not None:
            raise RequestError(
                Message(
                    Option("device"),
                    " cannot be combined with ",
                    Option("backend", value="xla"),
                    ", which has its own",
                )
            )
        # Raises an error for a mesh that is no shape.
        _ = self.mesh_shape

    @property
    def output(self) -> Path:
        """Return the path of the output: a folder, a file of GGUF, or a delta."""
        if self.dst is not None:
            return as_path("dst", self.dst)
        return as_path("delta", self.delta)

    @property
    def mesh_shape(self) -> tuple[int, int] | None:
        """Parse the sizes of the axes "data" and "model"; None if none are given."""
        return mesh_shape(self.mesh)

    @property
    def step_samples(self) -> int:
        """Return the number of samples of a step."""
        if self.batch is None:
            return BATCH
        return self.batch

    @property
    def num_epochs(self) -> int:
        """Return the number of passes over the samples."""
        if self.epochs is None:
            return EPOCHS
        return self.epochs

    def to_record(self) -> dict[str, object]:
        """List the options that the manifest and the resume fingerprint record: those that
        determine the result, apart from the samples.
        """
        return {
            "epochs": self.num_epochs,
            "batch": self.step_samples,
            "train_codes": self.train_codes,
            "train_norms": self.train_norms,
        }
