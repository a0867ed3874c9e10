"""Quantize the embedding and the head of a small model, of which they are much, by default."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.names import CANONICAL, EMBEDDING
from quantkit.architectures.topology import parameters
from quantkit.base.memory import size_text
from quantkit.base.messages import Message, Option
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.codecs.codec import Reason, choose_codec
from quantkit.formats.codecs.compressed_tensors import CompressedTensors
from quantkit.formats.registry import Target
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.scheme_map import find_embedding_override, find_head_override
from quantkit.tensors.dtypes import DType
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import EMBEDDING_SCHEME, KEEP

_HEAD = CANONICAL["head"]
# Of all weights, or of the bytes that are read for each token.
_LARGE_SHARE = 1 / 4
# Fewer weights take a few megabytes, which are not worth a rounding.
_MIN_WEIGHTS = 1 << 22


@dataclass(frozen=True)
class VocabularyShare:
    """What the embedding and the head are of a model.

    Attributes:
        weights: their number, a head that is tied to the embedding counted once.
        of_weights: their share of all weights.
        of_reads: the head's share of what is read for each token if all other linears are
            quantized and the head is not.
    """

    weights: int
    of_weights: float
    of_reads: float

    @classmethod
    def of(cls, config: ModelConfig, linear_bits: int) -> VocabularyShare:
        """Compute it for linears of `linear_bits` a weight."""
        vocabulary = 0
        head = 0
        others = 0
        linear_reads = 0.0
        experts = config.experts
        for parameter in parameters(config):
            count = math.prod(parameter.shape)
            if parameter.module in (EMBEDDING, _HEAD):
                vocabulary += count
                # Only one of them is a product: the head, or the embedding in its place.
                if config.tied_embeddings or parameter.module == _HEAD:
                    head = count
                continue
            others += count
            if parameter.is_linear_weight:
                # A token reads the weights of some experts only.
                read = float(count * linear_bits)
                if parameter.expert is not None and experts is not None:
                    read *= experts.per_token / experts.count
                linear_reads += read
        head_reads = head * 8 * DType(config.dtype).itemsize
        return cls(
            weights=vocabulary,
            of_weights=vocabulary / (vocabulary + others),
            of_reads=head_reads / (head_reads + linear_reads),
        )

    @property
    def is_large(self) -> bool:
        """Return whether quantizing them makes a model much smaller or faster."""
        share = max(self.of_weights, self.of_reads)
        return self.weights >= _MIN_WEIGHTS and share > _LARGE_SHARE


def choose_embedding(
    recipe: Recipe, options: QuantizeOptions, source: Checkpoint, target: Target
) -> tuple[Recipe, list[str]]:
    """Set the scheme of the embedding in a recipe for a format.

    If they are more than a quarter of a model, embedding and head are quantized by default. This is
    so for models of our own decoder, with schemes whose inputs are not rounded: the others are made
    for runtimes that need floats here. A recipe from a file, an option that names one of them, an
    average number of bits where the head is a matrix of its own, and a format without codes of
    embeddings leave them as they are; so does compressed-tensors if an option names it, because its
    other readers load no such embedding. One scale for each token becomes what the format prefers.

    Returns:
        The recipe, and a note if something is quantized that no option names.
    """
    assert target.codes is not None
    scheme = target.codes.embeddings[0]
    config = source.config
    override = find_embedding_override(recipe)
    if override is not None and override.pattern == EMBEDDING:
        if override.scheme != EMBEDDING_SCHEME or scheme == EMBEDDING_SCHEME:
            return recipe, []
        preferred = replace(override, scheme=scheme)
        overrides = [preferred if each is override else each for each in recipe.overrides]
        return Recipe(recipe.default, tuple(overrides)), []
    rounds_inputs = options.activations not in (None, "none") or recipe.default.of_small_floats
    if override is not None or isinstance(options.scheme, Recipe) or rounds_inputs:
        return recipe, []
    if options.to is not None and isinstance(target.method, CompressedTensors):
        return recipe, []
    head_override = find_head_override(recipe)
    if not config.runnable or (config.tied_embeddings and head_override is not None):
        return recipe, []
    # A separate head of 8 bits would count among the linears whose average is requested, and could
    # leave no choice for the others.
    if options.target_bits is not None and not config.tied_embeddings:
        return recipe, []
    codec = choose_codec(target.codes, scheme, embedding=True)
    # A default must not refuse what floats allow, such as rows that blocks do not divide.
    if isinstance(codec, Reason) or codec.misfit(source.info(f"{EMBEDDING}.weight").shape):
        return recipe, []
    share = VocabularyShare.of(config, recipe.default.bits)
    if not share.is_large:
        return recipe, []
    overrides = list(recipe.overrides)
    # A model card names the head's scheme first, then the embedding's.
    place = 0
    modules = "the embedding"
    if config.tied_embeddings:
        modules += ", which is the head too,"
    elif head_override is None:
        overrides.insert(0, Override(_HEAD, scheme))
        place = 1
        modules = "the embedding and the head"
    elif overrides[0].pattern == _HEAD:
        place = 1
    overrides.insert(place, Override(EMBEDDING, scheme))
    float_bytes = share.weights * DType(config.dtype).itemsize
    note = Message(
        f"{source.path}: {modules} would be {size_text(float_bytes)} of floats,"
        f" {share.of_weights:.0%} of the weights and {share.of_reads:.0%} of what is read for each"
        f" token, so that {scheme} is used; ",
        Option("embedding", value=KEEP),
        " leaves the floats",
    )
    return Recipe(recipe.default, tuple(overrides)), [note]
