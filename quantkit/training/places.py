"""Find where a model that transformers runs has the tensors that training changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import nn

from quantkit.formats.checkpoint import Checkpoint
from quantkit.passes.site import WEIGHT, Site
from quantkit.training.blockwise import Place
from quantkit.training.trained import TrainedNames, has_trained_scales
from quantkit.via_transformers.forward import passage_of
from quantkit.via_transformers.lazy_model import LazyModel
from quantkit.via_transformers.sites import find_sites


def find_trained_names(quantized: Checkpoint, *, norms: bool, codes: bool) -> TrainedNames:
    """Find the tensors of a model that transformers runs that can be trained, as `TrainedNames.of`.
    Those that several blocks have in common stay as they are.

    Raises:
        UnsupportedError: if there is no such weight, or transformers does not run the model.
    """
    lazy = passage_of(quantized).partwise
    weights = tuple(_find_weights(lazy, quantized))
    norm_names: tuple[str, ...] = ()
    if norms:
        norm_names = tuple(_find_norms(lazy, quantized))
    names = TrainedNames(weights, norm_names, codes)
    names.require_weights(quantized)
    return names


def find_places(lazy: LazyModel, checkpoint: Checkpoint, names: TrainedNames) -> dict[str, Place]:
    """Find the places of trained tensors, by their names on disk."""
    places = {**_find_weights(lazy, checkpoint), **_find_norms(lazy, checkpoint)}
    return {name: places[name] for name in (*names.weights, *names.norms)}


def _find_weights(lazy: LazyModel, checkpoint: Checkpoint) -> dict[str, Place]:
    linears: list[str] = []
    for name in checkpoint.names():
        if has_trained_scales(checkpoint.info(name).scheme):
            linears.append(name.removesuffix(f".{WEIGHT}"))
    sites, _ = find_sites(lazy, linears)
    # Several linears may be one parameter, such as gate and up, and one linear several.
    sites_of_linear: dict[str, list[Site]] = defaultdict(list)
    for site in sites:
        for linear, _, _ in site.rows:
            sites_of_linear[linear].append(site)
    places: dict[str, Place] = {}
    for linear, linear_sites in sites_of_linear.items():
        blocks = {lazy.part_of(site.module) for site in linear_sites}
        block = blocks.pop()
        # Head and embedding do not change.
        if blocks or block is None or not lazy.is_listed(block):
            continue
        parameters = tuple(site.parameter for site in linear_sites)
        if any(len(lazy.same_as(parameter)) > 1 for parameter in parameters):
            continue
        places[f"{linear}.{WEIGHT}"] = Place(block, parameters, linear, tuple(linear_sites))
    # In the order of the model on disk.
    return {f"{linear}.{WEIGHT}": place for linear, place in _in_order(linears, places)}


def _in_order(linears: list[str], places: dict[str, Place]) -> Iterator[tuple[str, Place]]:
    for linear in linears:
        place = places.get(f"{linear}.{WEIGHT}")
        if place is not None:
            yield linear, place


def _find_norms(lazy: LazyModel, checkpoint: Checkpoint) -> dict[str, Place]:
    body_modules = set(lazy.body.modules())
    places: dict[str, Place] = {}
    for name in checkpoint.names():
        target, pattern = lazy.targets.get(name, ("", None))
        module, _, leaf = target.rpartition(".")
        is_vector = len(checkpoint.info(name).shape) == 1
        if not (module.endswith("norm") and leaf == WEIGHT and pattern is None and is_vector):
            continue
        # Gradients do not reach what follows the body.
        norm: nn.Module = lazy.model.get_submodule(module)
        if len(lazy.same_as(target)) > 1 or norm not in body_modules:
            continue
        block = lazy.part_of(module)
        if block is not None and not lazy.is_listed(block):
            block = None
        places[name] = Place(block, (target,))
    return places
