"""GPTQ for a model that transformers runs: which of its linears samples reach, and what solves
them.
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.architectures.topology import kept_unless_named
from quantkit.base.progress import Progress
from quantkit.calibration.data import Calibration
from quantkit.calibration.lockstep_quantizer import LockstepQuantizer
from quantkit.calibration.settings import GptqSettings
from quantkit.errors import RequestError, UnsupportedError
from quantkit.jobs.quantize.prepare import Prepared
from quantkit.model.shared_scales import SharedScales
from quantkit.via_transformers.forward import passage_of
from quantkit.via_transformers.sites import find_sites

_NAMED = 4
_UNREACHED = "no calibration sample was seen to reach it"
_REPEATED = "a forward pass uses it several times"


def survey_linears(prepared: Prepared, drawn: Calibration) -> Prepared:
    """Return a job that knows how samples reach the linears; those that cannot be solved keep their
    floats, with a note.

    Raises:
        UnsupportedError: if transformers cannot run the model, or no linear can be solved.
        RequestError: if one cannot be solved that is quantized only because the recipe names it.
    """
    passage = passage_of(prepared.source)
    sites, kept = find_sites(passage.lazy, prepared.scheme_map.linears)
    survey = passage.survey(sites, drawn.tokens[:1])
    for reason, own in ((_UNREACHED, survey.unreached), (_REPEATED, survey.repeated)):
        kept |= {module: reason for site in own for module, _, _ in site.rows}
    chosen = {
        module: reason for module, reason in kept.items() if module in prepared.scheme_map.schemes
    }
    notes = [f"{prepared.source.path}: {line}" for line in _lines(chosen)]
    if chosen.keys() == prepared.scheme_map.linears.keys():
        module, reason = next(iter(chosen.items()))
        raise UnsupportedError(
            "GPTQ can solve no linear layer of this model",
            path=prepared.source.path,
            found=f"'{module}': {reason}",
            hint='`method="rtn"` rounds them',
        )
    if named := [
        module for module in chosen if module in kept_unless_named(prepared.source.config)
    ]:
        raise RequestError(
            f"GPTQ cannot solve '{named[0]}', which the recipe names: {chosen[named[0]]}",
            path=prepared.source.path,
            found=f"{len(named)} such linear{'s' * (len(named) > 1)}",
            hint='leave it out of the recipe; `method="rtn"` rounds it',
        )
    scheme_map = prepared.scheme_map.without(chosen)
    return replace(prepared, scheme_map=scheme_map, survey=survey, notes=[*prepared.notes, *notes])


def lockstep_quantizer(
    prepared: Prepared, settings: GptqSettings, drawn: Calibration, progress: Progress
) -> LockstepQuantizer:
    """Return what solves the linears."""
    assert prepared.survey is not None
    source = prepared.source
    effort = settings.effort_on(
        source.config, drawn.tokens.shape, prepared.scheme_map.linears.values()
    )
    return LockstepQuantizer(
        source,
        drawn,
        prepared.scheme_map.schemes,
        passage_of(source),
        prepared.survey,
        memory_bytes=settings.memory_bytes,
        effort=effort,
        allow_nonfinite=prepared.options.allow_nonfinite,
        progress=progress,
        shared=SharedScales(source, prepared.scheme_map.schemes),
        kernels_of=prepared.kernels_of,
    )


def _lines(kept: dict[str, str]) -> list[str]:
    """Return which linears keep their floats, a line for each reason."""
    result = []
    for reason in dict.fromkeys(kept.values()):
        modules = [module for module, own in kept.items() if own == reason]
        if len(modules) > _NAMED:
            more = f" and {len(modules) - _NAMED} more"
        else:
            more = ""
        if len(modules) > 1:
            verb = "keep their floats"
        else:
            verb = "keeps its floats"
        result.append(f"{', '.join(modules[:_NAMED])}{more} {verb}: {reason}")
    return result
