"""Find which linears of a model that transformers runs the samples of GPTQ reach."""

from __future__ import annotations

from quantkit.architectures.topology import collect_default_floats
from quantkit.base.messages import Message, Option
from quantkit.calibration.data import Calibration
from quantkit.errors import RequestError, UnsupportedError
from quantkit.jobs.quantize.formats import FormatPlan
from quantkit.passes.passage import Inputs, Survey
from quantkit.via_transformers.forward import passage_of
from quantkit.via_transformers.sites import find_sites

_SHARED = "other layers share its weights, which are solved for the inputs of the first"
# Modules that a note lists by name.
_NAMED = 4
_UNREACHED = "no calibration sample was seen to reach it"
_REPEATED = "a forward pass uses it several times"
_DIVIDED = "transformers splits it, and its parts have different inputs"


def survey_linears(
    plan: FormatPlan, drawn: Calibration, *, solves_repeated: bool
) -> tuple[dict[str, str], list[str], Survey]:
    """Find how samples reach the linears, and which of them cannot be solved.

    Args:
        plan: of one of the formats; all have the same schemes.
        solves_repeated: whether linears that a forward pass uses several times are quantized, which
            have no loss to choose their scheme by.

    Returns:
        The linears that keep their floats, each with the reason; notes on these; and the survey.

    Raises:
        UnsupportedError: if transformers cannot run the model, or no linear can be solved.
        RequestError: if one cannot be solved that is quantized only because the recipe names it.
    """
    source = plan.source
    schemes = plan.scheme_map.schemes
    linears = plan.scheme_map.linears
    passage = passage_of(source)
    sites, kept = find_sites(passage.partwise, linears)
    # All batches take the same path, or calibration refuses them: one sample shows it.
    survey = passage.survey(sites, drawn.tokens[:1])
    repeated_sites = list(survey.repeated)
    if not solves_repeated:
        for group in survey.groups:
            if group.is_repeated:
                repeated_sites += group.sites
    for reason, unsolved_sites in ((_UNREACHED, survey.unreached), (_REPEATED, repeated_sites)):
        for site in unsolved_sites:
            for module, _, _ in site.rows:
                kept[module] = reason
    group_of_module: dict[str, Inputs] = {}
    for group in survey.groups:
        for site in group.sites:
            for module, _, _ in site.rows:
                if group_of_module.setdefault(module, group) != group:
                    kept[module] = _DIVIDED
    # Modules without a scheme keep their floats anyway, and need no note.
    unsolved = {module: reason for module, reason in kept.items() if module in schemes}
    shared: list[str] = []
    for group in survey.groups:
        for site in group.sites:
            if len(passage.partwise.same_as(site.parameter)) > 1:
                shared += [module for module, _, _ in site.rows if module in schemes]
    lines = _describe_kept_linears(unsolved)
    if shared:
        lines.append(f"{_list_names(shared)}: {_SHARED}")
    notes = [f"{source.path}: {line}" for line in lines]
    if unsolved.keys() == linears.keys():
        module, reason = next(iter(unsolved.items()))
        raise UnsupportedError(
            "GPTQ cannot quantize any linear layer of this model",
            path=source.path,
            found=f"'{module}': {reason}",
            hint=Message(Option("method", value="rtn"), " rounds them to nearest"),
        )
    # A recipe that names such a module requests it explicitly: a note would not do.
    requested_by_name = []
    for module in unsolved:
        if module in collect_default_floats(source.config):
            requested_by_name.append(module)
    if requested_by_name:
        module = requested_by_name[0]
        count = len(requested_by_name)
        raise RequestError(
            f"GPTQ cannot quantize '{module}', which the recipe names: {unsolved[module]}",
            path=source.path,
            found=f"{count} such linear{'s' * (count > 1)}",
            hint=Message(
                "leave it out of the recipe; ",
                Option("method", value="rtn"),
                " rounds it to nearest",
            ),
        )
    return unsolved, notes, survey


def _describe_kept_linears(kept: dict[str, str]) -> list[str]:
    """Describe which linears keep their floats, in a line for each reason."""
    modules_by_reason: dict[str, list[str]] = {}
    for module, reason in kept.items():
        modules_by_reason.setdefault(reason, []).append(module)
    lines = []
    for reason, modules in modules_by_reason.items():
        if len(modules) > 1:
            verb = "stay unquantized"
        else:
            verb = "stays unquantized"
        lines.append(f"{_list_names(modules)} {verb}: {reason}")
    return lines


def _list_names(modules: list[str]) -> str:
    """List the first modules by name, and the number of others."""
    names = ", ".join(modules[:_NAMED])
    if len(modules) > _NAMED:
        return f"{names} and {len(modules) - _NAMED} more"
    return names
