"""Find where a model that transformers runs has the tensors that training changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from quantkit.formats.checkpoint import Checkpoint
from quantkit.passes.site import WEIGHT, Site
from quantkit.training.trained import TrainedNames, has_trained_scales
from quantkit.via_transformers.forward import passage_of
from quantkit.via_transformers.lazy_model import LazyModel
from quantkit.via_transformers.sites import find_sites


@dataclass(frozen=True)
class Place:
    """A part of a parameter.

    Attributes:
        parameter: its name in the model.
        block: the part that it is in; None for one outside of blocks.
        site, start, stop: the product with a linear's weight, and the linear's rows there; None for
            a norm, which is the parameter.
    """

    parameter: str
    block: str | None
    site: Site | None = None
    start: int = 0
    stop: int = 0

    def select(self, gradient: Tensor) -> Tensor:
        """Select the gradient by the tensor from that by the parameter."""
        if self.site is None:
            return gradient
        return self.site.of(gradient)[self.start : self.stop]


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
    places: dict[str, Place] = {}
    for site in sites:
        block = lazy.part_of(site.module)
        # Head and embedding do not change.
        if block is None or not lazy.is_listed(block) or len(lazy.same_as(site.parameter)) > 1:
            continue
        # Several linears may be one parameter, such as gate and up.
        for linear, start, stop in site.rows:
            places[f"{linear}.{WEIGHT}"] = Place(site.parameter, block, site, start, stop)
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
        places[name] = Place(target, block)
    return places
