"""What `quantize` does where it is asked for a size: the schemes are chosen once the samples are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quantkit.architectures.topology import linear_columns
from quantkit.bit_allocation.allocation import Allocation, SizeTarget
from quantkit.bit_allocation.fit import CANDIDATES, Fit
from quantkit.bit_allocation.units import units
from quantkit.calibration.data import Calibration
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import RequestError
from quantkit.formats.codecs.codec import Reason
from quantkit.formats.container import Output
from quantkit.formats.output.staging import interrupted_fingerprint
from quantkit.formats.registry import Target
from quantkit.jobs.certificate import CertifiedText
from quantkit.jobs.estimate import Estimate, estimate_quantization, require_buildable
from quantkit.jobs.output import option_key
from quantkit.jobs.prepare import Prepared, planned_output, reassigned, tensor_blocks
from quantkit.jobs.settings import GptqSettings
from quantkit.progress import Progress
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

OPTION = "bit_allocation"
"""Under which the manifest, and the journal of an interrupted run, tell what was chosen."""
_HEAD = "lm_head"


def requested_recipe(
    scheme: str | QuantScheme | Recipe | None, size: SizeTarget | None, head: str | QuantScheme | None, target: Target
) -> str | QuantScheme | Recipe | None:
    """What `prepare` is given: what was asked for, with a scheme for the head; of a size what stands for the schemes
    until they are chosen, which is one that the target holds.

    Raises:
        RequestError: if a head goes with a recipe.
    """
    if size is None and head is None:
        return scheme
    if isinstance(scheme, Recipe):
        raise RequestError("`head` does not go with a recipe", hint=f"name {_HEAD} among its overrides")
    default = scheme if size is None else _stand_in(target)
    if default is None or head is None:
        return default
    default, own = (one if isinstance(one, QuantScheme) else QuantScheme.parse(one) for one in (default, head))
    return Recipe(default, (Override(_HEAD, own),))


def _stand_in(target: Target) -> QuantScheme:
    """The finest candidate that a target holds, which fits rows of all lengths if it is int8."""
    assert target.codes is not None
    held = [one for one in CANDIDATES if not isinstance(target.codes.codec(one), Reason)]
    return held[-1] if held else CANDIDATES[-1]


@dataclass(frozen=True)
class SizeFit:
    """A source whose schemes are to be chosen for a size.

    Attributes:
        prepared: with schemes that stand for those to be chosen.
        target: as what it is written.
        shard_bytes, name: see `planned_output`.
    """

    prepared: Prepared
    size: SizeTarget
    target: Target
    template: str | None
    shard_bytes: int
    name: str
    dst: Path

    def choose(
        self, long: CertifiedText | None, on_estimate: Callable[[Estimate], None] | None, *, resume: bool,
        source_check: bool, group: ProcessGroup, progress: Progress,
    ) -> tuple[Prepared, Allocation, Calibration]:  # fmt: skip
        """The source with the chosen schemes, the choice, and the samples that it was made with.

        Args:
            long, on_estimate, resume, source_check, group, progress: of `quantize`.

        Raises:
            QuantkitError: as `quantize` does.
        """
        fit, settings = self.fit(), self.settings
        if group.is_rank0:
            self.require_buildable(resume=resume)
            if on_estimate is not None:
                on_estimate(self.estimate(fit, long, source_check=source_check))
        drawn = settings.draw(self.prepared.tokenizer, self.prepared.source, group=group, progress=progress)
        prepared, allocation = self.chosen(fit, drawn, resume=resume, group=group, progress=progress)
        return prepared, allocation, drawn

    def total_bytes(self, schemes: Mapping[str, QuantScheme]) -> int:
        """Of all files of weights, given the scheme of each module that gets one."""
        return self.target.container.encoder(self._output(schemes)).total_bytes()

    def require_buildable(self, *, resume: bool) -> None:
        """
        Raises:
            DestinationError, ResumeError: if the output cannot be built.
        """
        stands_in = self.target.container.encoder(self._output(self.prepared.scheme_map.schemes))
        require_buildable(self.dst, stands_in, resume=resume)

    def estimate(self, fit: Fit, long: CertifiedText | None, *, source_check: bool) -> Estimate:
        """What all of it takes, before the choice is made."""
        output = self._output(self.prepared.scheme_map.schemes)
        encoder, side_files = self.target.container.encoder(output), self.target.container.side_files(output)
        return estimate_quantization(self.prepared, encoder, side_files, long, source_check=source_check, fit=fit)

    @property
    def settings(self) -> GptqSettings:
        """Of GPTQ, the only method that a size goes with."""
        assert self.prepared.settings is not None
        return self.prepared.settings

    def fit(self) -> Fit:
        """What chooses.

        Raises:
            RequestError: if no choice has the size.
            UnsupportedError: if the format does not hold several schemes.
        """
        codes = self.target.codes
        assert codes is not None
        return Fit(self.prepared.source, self.size, codes, self.target.method, self._settled(), self.total_bytes)

    def chosen(
        self, fit: Fit, drawn: Calibration, *, resume: bool, group: ProcessGroup, progress: Progress
    ) -> tuple[Prepared, Allocation]:
        """The source with the chosen schemes, and the choice: of a run that is resumed its own.

        Raises:
            QuantkitError: as `quantize` does.
        """
        settings = self.settings
        allocation = group.broadcast_from_rank0(self._of_interrupted(drawn) if resume else None)
        if allocation is None:
            allocation = fit.chosen(
                drawn.tokens, device=settings.device, memory_bytes=settings.memory_bytes, group=group,
                progress=progress,
            )  # fmt: skip
        recipe = allocation.recipe(self.prepared.scheme_map.recipe.overrides)
        return reassigned(self.prepared, recipe, self.dst, self.target), allocation

    def _output(self, schemes: Mapping[str, QuantScheme]) -> Output:
        blocks = tensor_blocks(self.prepared.source, schemes, self.target)
        return planned_output(self.prepared, blocks, self.target, self.template, self.shard_bytes, self.name, self.dst)

    def _of_interrupted(self, drawn: Calibration) -> Allocation | None:
        """What an interrupted run for the same size and samples chose; whether all else is the same is looked at
        when it is taken up."""
        told = interrupted_fingerprint(self.dst)
        found, calibration = told.get(option_key(OPTION)), told.get(option_key("calibration"))
        if not isinstance(found, dict) or calibration != drawn.to_json():
            return None
        allocation = Allocation.from_json(found)
        return allocation if allocation.target == self.size else None

    def _settled(self) -> dict[str, QuantScheme | None]:
        """The modules whose schemes are not chosen: named ones, and linears of blocks that are kept."""
        source, schemes = self.prepared.source, self.prepared.scheme_map.schemes
        free = {module for unit in units(source.config) for module in unit.modules}
        kept = [module for module in linear_columns(source.config) if module in free and module not in schemes]
        named = {module: scheme for module, scheme in schemes.items() if module not in free}
        return {**named, **dict.fromkeys(kept)}
