"""The plan of a quantization: what each of its stages needs, from the options and the source's
headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.architectures.config import ModelConfig
from quantkit.calibration.settings import GptqSettings
from quantkit.formats.kv_scales import KvCacheName
from quantkit.jobs.quantize.certificate import CertifiedText
from quantkit.jobs.quantize.formats import Formats
from quantkit.jobs.quantize.options import Method
from quantkit.jobs.quantize.scheme_map import SchemeMap


@dataclass(frozen=True)
class SolverPlan:
    """How codes and scales are computed.

    Attributes:
        settings: of GPTQ; None for rounding.
        imatrix: a file with the importance of inputs; None to measure it.
        kv_cache: the type of the KV cache whose scales are computed; None for none.
    """

    settings: GptqSettings | None
    allow_nonfinite: bool
    imatrix: Path | None
    kv_cache: KvCacheName | None

    @property
    def method(self) -> Method:
        if self.settings is None:
            return "rtn"
        return "gptq"

    def is_weighted(self, config: ModelConfig, scheme_map: SchemeMap) -> bool:
        """Decide whether errors of rounding are weighted by the importance of inputs: for fewer
        bits than 8, if the model can be run.
        """
        # GPTQ measures the inputs itself.
        if self.settings is not None or not config.measurable:
            return False
        # The rows of the embedding are looked up: it has no inputs to weight.
        return any(scheme.bits < 8 for scheme in scheme_map.linears.values())


@dataclass(frozen=True)
class Checks:
    """How source and result are checked.

    Attributes:
        source_check: whether the source is run on a sample text first.
        certified: the text on which the loss by position is measured; None if this was not
            requested.
        accept_quality_loss: whether a result is kept that is too far from its source.
    """

    source_check: bool
    certified: CertifiedText | None
    accept_quality_loss: bool


@dataclass(frozen=True)
class Request:
    """What the manifest and the model card state about the request.

    Attributes:
        recorded: entries of the manifest: options that determine the bytes of the weights, as far
            as they follow neither from the schemes nor from the solver.
        command: options of the command that repeats the job, by name, as far as they are known
            before the schemes are; None and False leave an option out.
        base_model: the requested name of the source on a hub; None for the one in its own files.
    """

    recorded: Mapping[str, object]
    command: Mapping[str, object]
    base_model: str | None

    def without_refinement(self) -> Request:
        """Copy the request of a result that is refined, for one that is not."""
        refinement = dict.fromkeys(("refine", "train_codes", "train_norms", "epochs"))
        return replace(self, command={**self.command, **refinement})


@dataclass(frozen=True)
class Plan:
    """A planned quantization.

    Attributes:
        notes: for the user, on the source and the options; those on schemes and samples are
            with each format.
    """

    formats: Formats
    solver: SolverPlan
    checks: Checks
    request: Request
    notes: list[str]
