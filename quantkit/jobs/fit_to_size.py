"""What `quantize` does where it is asked for a size: the schemes are chosen once the samples are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quantkit.architectures.topology import linear_columns
from quantkit.bit_allocation.allocation import Allocation, SizeTarget
from quantkit.bit_allocation.fit import CANDIDATES, Fit
from quantkit.bit_allocation.units import units
from quantkit.calibration.data import Calibration
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import RequestError
from quantkit.formats.output.destination import output_files
from quantkit.formats.output.staging import (
    interrupted_fingerprint,
    partial_folder,
    require_output_absent,
    require_room_to_build,
)
from quantkit.formats.registry import Target
from quantkit.jobs.output import option_key
from quantkit.jobs.prepare import Prepared, planned_output, reassigned, tensor_blocks
from quantkit.jobs.settings import GptqSettings
from quantkit.progress import Progress
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

OPTION = "bit_allocation"
"""Under which the manifest, and the journal of an interrupted run, tell what was chosen."""
_HEAD = "lm_head"


def asked_recipe(
    scheme: str | QuantScheme | Recipe | None, target: SizeTarget | None, head: str | QuantScheme | None
) -> str | QuantScheme | Recipe | None:
    """What `prepare` is given: what was asked for, with a scheme for the head; of a size what stands for the schemes
    until they are chosen.

    Raises:
        RequestError: if a head goes with a recipe.
    """
    if target is None and head is None:
        return scheme
    if isinstance(scheme, Recipe):
        raise RequestError("`head` does not go with a recipe", hint=f"name {_HEAD} among its overrides")
    default = CANDIDATES[0] if target is not None else scheme
    if default is None or head is None:
        return default
    default, own = (one if isinstance(one, QuantScheme) else QuantScheme.parse(one) for one in (default, head))
    return Recipe(default, (Override(_HEAD, own),))


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

    def total_bytes(self, schemes: Mapping[str, QuantScheme]) -> int:
        """Of all files of weights, given the scheme of each module that gets one."""
        blocks = tensor_blocks(self.prepared.source, schemes, self.target)
        planned = planned_output(
            self.prepared, blocks, self.target, self.template, self.shard_bytes, self.name, self.dst
        )
        return self.target.container.encoder(planned).total_bytes()

    def required(self, settings: GptqSettings | None) -> Fit:
        """What chooses.

        Raises:
            RequestError: if the method is another than GPTQ, or no choice has the size.
            UnsupportedError: if the format does not hold several schemes.
        """
        if settings is None:
            raise RequestError("a size to fit goes with GPTQ", found='`method="rtn"`', expected='`method="gptq"`')
        assert self.target.codes is not None
        return Fit(self.prepared.source, self.size, self.target.codes, self._settled(), self.total_bytes)

    def chosen(
        self, fit: Fit, drawn: Calibration, settings: GptqSettings, *, resume: bool, group: ProcessGroup,
        progress: Progress,
    ) -> tuple[Prepared, Allocation]:  # fmt: skip
        """The source with the chosen schemes, and the choice: of a run that is resumed its own.

        Raises:
            QuantkitError: as `quantize` does.
        """
        partial = partial_folder(self.dst)
        require_output_absent(self.dst, output_files(self.dst, ()), partial)
        require_room_to_build(partial, resume=resume)
        allocation = group.agree(self._of_interrupted(drawn) if resume else None)
        if allocation is None:
            allocation = fit.chosen(
                drawn.tokens, device=settings.device, memory_bytes=settings.memory_bytes, group=group,
                progress=progress,
            )  # fmt: skip
        recipe = allocation.recipe(self.prepared.scheme_map.recipe.overrides)
        return reassigned(self.prepared, recipe, self.dst, self.target), allocation

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
