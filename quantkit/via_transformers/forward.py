"""Compute hidden states and logits of any checkpoint that can be run, by quantkit's decoder or by
transformers.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.architectures.families import may_be_known_family
from quantkit.architectures.names import CANONICAL
from quantkit.architectures.topology import linear_columns
from quantkit.base.json_values import format_value
from quantkit.base.late import LateFunction
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, silent
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import QuantkitError, RequestError, UnreadLayoutError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.detect import open_checkpoint, open_pair
from quantkit.model.layerwise import Batch, Observe, head_logits, layerwise_hidden
from quantkit.model.rounded_inputs import RoundedInputs
from quantkit.via_transformers import Via
from quantkit.via_transformers.stacks import unstack

# quantkit's own decoder runs without these.
if TYPE_CHECKING:
    from quantkit.architectures.text_part import media_tokens
    from quantkit.formats.detect import WeightKind
    from quantkit.passes.passage import Passage
    from quantkit.passes.site import Brought, Site
    from quantkit.via_transformers.lazy_model import LazyModel
    from quantkit.via_transformers.linears import is_headless, is_known
    from quantkit.via_transformers.own_code import (
        code_file,
        make_untrusted_error,
        needs_code,
        require_here,
        takes_code,
    )
else:
    media_tokens = LateFunction("quantkit.architectures.text_part:media_tokens")
    is_headless = LateFunction("quantkit.via_transformers.linears:is_headless")
    is_known = LateFunction("quantkit.via_transformers.linears:is_known")
    code_file = LateFunction("quantkit.via_transformers.own_code:code_file")
    make_untrusted_error = LateFunction("quantkit.via_transformers.own_code:make_untrusted_error")
    needs_code = LateFunction("quantkit.via_transformers.own_code:needs_code")
    require_here = LateFunction("quantkit.via_transformers.own_code:require_here")
    takes_code = LateFunction("quantkit.via_transformers.own_code:takes_code")

_HEAD = CANONICAL["head"]

# Tokens of a model whose config states no longest context.
_CONTEXT = 2048
# The attribute of a checkpoint with its passage, so that both are freed together.
_PASSAGE = "_passage"


def final_hidden(
    checkpoint: Checkpoint,
    batches: Sequence[Batch],
    *,
    cache_dtype: torch.dtype | None = None,
    group: ProcessGroup = SINGLE,
    progress: Progress = silent,
) -> list[Tensor]:
    """Compute the hidden states [B, T, D] before the head of every batch, in float32; see
    `layerwise_hidden`. Transformers runs batches from their start, in one process; `cache_dtype` is
    for models that quantkit runs.
    """
    if checkpoint.config.runnable:
        return layerwise_hidden(
            checkpoint, batches, cache_dtype=cache_dtype, group=group, progress=progress
        )
    # Imports transformers, which is optional.
    from quantkit.via_transformers.cached_attention import rounding_cache

    passage = passage_of(checkpoint)
    tokens_of_batches = [batch.tokens for batch in batches]
    with rounding_cache(checkpoint, passage.partwise):
        return passage.compute_hidden_states(tokens_of_batches, progress)


def observe_inputs(
    checkpoint: Checkpoint,
    tokens: Tensor,
    observe: Observe,
    *,
    linears: Collection[str] | None = None,
    progress: Progress = silent,
) -> None:
    """Send samples [B, T] through a model, with one block's weights in memory at a time.

    Args:
        observe: called with the name of each linear that the samples reach, the head too, and its
            inputs [..., I] in float32, for each use; an expert's are the tokens that are sent to
            it.
        linears: observes only these; None is all.

    Raises:
        UnsupportedError: if transformers fails.
    """
    if checkpoint.config.runnable:

        def observe_selected(linear: str, inputs: Tensor) -> None:
            if linears is None or linear in linears:
                observe(linear, inputs)

        (hidden,) = layerwise_hidden(
            checkpoint, [Batch.from_start(tokens)], observe=observe_selected, progress=progress
        )
        observe_selected(_HEAD, hidden)
        return
    from quantkit.via_transformers.sites import find_sites

    def observe_site(site: Site, brought: Brought) -> None:
        for linear, _, rows_of_linear in site.parts():
            # The other parts of a linear that transformers splits have the same inputs.
            if rows_of_linear.start == 0:
                observe(linear, brought.inputs.float())

    passage = passage_of(checkpoint)
    observed_linears: list[str] = []
    for linear in linear_columns(checkpoint.config):
        if linears is None or linear in linears:
            observed_linears.append(linear)
    sites = find_sites(passage.partwise, observed_linears)[0]
    passage.compute_hidden_states([tokens], progress, sites=sites, on_product=observe_site)


def final_logits(
    checkpoint: Checkpoint, hidden: Sequence[Tensor], *, group: ProcessGroup = SINGLE
) -> list[Tensor]:
    """Compute the logits [N, V] of each of some hidden states [N, D], in float32; see
    `head_logits`. Raises `UnsupportedError` if a model of transformers predicts no tokens.
    """
    if checkpoint.config.runnable:
        return head_logits(checkpoint, hidden, group=group)
    logits = passage_of(checkpoint).compute_logits(torch.cat(list(hidden)))
    size = checkpoint.config.vocab_size
    if logits.shape[-1] < size:
        raise UnsupportedError(
            "the model has no output head",
            path=checkpoint.path,
            found=f"{logits.shape[-1]} numbers for a token",
            expected=f"a logit for each of {size} tokens",
        )
    return list(torch.split(logits, [len(states) for states in hidden]))


def is_installed() -> bool:
    """Check that transformers is installed."""
    # Importing transformers would take seconds.
    return importlib.util.find_spec("transformers") is not None


def require_installed() -> None:
    """Raise a `RequestError` unless transformers is installed."""
    if not is_installed():
        raise RequestError(
            "transformers must be installed to run this model",
            hint="pip install 'quantkit[transformers]'",
        )


def run_by_transformers(
    source: StoredCheckpoint, *, trust_remote_code: bool = False, code: Path | None = None
) -> StoredCheckpoint:
    """Prepare a source that is known by its tensors only to be run by transformers. Transformers
    also gives the sizes that an unknown config has under other names, and shows whether the head is
    the embedding. A note says if the source's folder has code that is not run.

    Args:
        trust_remote_code: run code that its config.json names, as `AutoModelForCausalLM` does with
            this argument.
        code: a folder with the same code, which is trusted, to be run instead.

    Raises:
        RequestError: if transformers is not installed, or code is needed and not trusted, or cannot
            be imported.
        UnsupportedError, CheckpointError: if the model cannot be built, or the code is missing.
    """
    require_installed()
    from quantkit.via_transformers.cached_attention import find_cached_attention
    from quantkit.via_transformers.embedding import has_tied_head

    raw = source.extra_config
    if code is None and trust_remote_code and takes_code(raw):
        code = source.path
    if code is None and needs_code(raw):
        require_here(raw, source.path)
        raise make_untrusted_error(raw, source.path)
    # Building the model reads the config, so the code and the linears of experts must be in it.
    source.config = replace(source.config, code=code)
    unstack(source)
    lazy = passage_of(source).partwise
    config = source.config
    model = lazy.model
    if is_headless(model):
        raise UnsupportedError(
            "the model has no output head",
            path=source.path,
            found=type(model).__name__,
            expected="a language model's class in config.json's 'architectures'",
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(
            "the model has an encoder, whose output its decoder needs",
            path=source.path,
            found=type(model).__name__,
            expected="a model that continues text",
        )
    rows, width = model.get_input_embeddings().weight.shape
    version = _version()
    unused_code = code_file(raw)
    if code is not None:
        version += " with the folder's own code"
    elif unused_code is not None:
        used = (
            f"transformers' own {type(model).__name__} for"
            f" {format_value(raw.get('model_type'))} is used"
        )
        source.notes.append(f"{source.path}: its code ({unused_code}) is not run: {used}")
    if source.kv_cache is not None:
        # What was noted before it was known what runs the model.
        unrun = f"{source.path}: {source.kv_cache.note(run_here=False)}"
        is_rounded = bool(find_cached_attention(lazy))
        run = f"{source.path}: {source.kv_cache.note(run_here=is_rounded)}"
        source.notes[:] = [run if note == unrun else note for note in source.notes]
    source.config = replace(
        config,
        run_by=version,
        max_context=config.max_context or _CONTEXT,
        vocab_size=config.vocab_size or rows,
        hidden_size=config.hidden_size or width,
        tied_embeddings=has_tied_head(lazy),
        media_tokens=media_tokens(raw),
    )
    return source


def open_to_run(
    path: str | Path,
    weights: WeightKind | None = None,
    via: Via | None = None,
    *,
    trust_remote_code: bool = False,
) -> StoredCheckpoint:
    """Open a model to run it, like `open_checkpoint`: by quantkit's decoder if it knows the family;
    or else by transformers, if that is installed and knows the architecture, or the folder has the
    code; only by `via`, if that is given. A folder that was made from tensors only, and that
    neither runs, is opened as it is.

    Args:
        trust_remote_code: see `run_by_transformers`.

    Raises:
        RequestError: as `open_checkpoint` and `run_by_transformers`; or if the family is not known,
            and transformers is not installed.
        UnsupportedError, CheckpointError: as `open_checkpoint`; or if the model cannot be built
            with transformers.
    """
    if via == "transformers":
        source = open_checkpoint(path, weights, tensors_only=True)
        return run_by_transformers(source, trust_remote_code=trust_remote_code)
    try:
        source = open_checkpoint(path, weights)
    except UnsupportedError:
        if via is not None:
            raise
        by_tensors = _by_tensors(path, weights)
        if by_tensors is None:
            raise
        # In a known family, the error of quantkit's decoder says more than a missing package.
        if not may_be_known_family(by_tensors.extra_config):
            _require_installed_for(by_tensors)
        if not _runs(by_tensors):
            raise
        source = by_tensors
    by_transformers = via is None and not source.config.runnable and _runs(source)
    if by_transformers:
        return run_by_transformers(source, trust_remote_code=trust_remote_code)
    return source


def open_to_look_at(path: str | Path, weights: WeightKind | None = None) -> StoredCheckpoint | None:
    """Open a model for which quantkit has no decoder, by its tensors, if transformers knows it;
    None otherwise. The model is not built.

    Raises:
        CheckpointError: if it is damaged.
    """
    source = _by_tensors(path, weights)
    if source is None or not is_installed() or not is_known(source.extra_config):
        return None
    source.config = replace(source.config, run_by=_version())
    return source


def open_pair_to_compare(a: str | Path, b: str | Path) -> tuple[StoredCheckpoint, StoredCheckpoint]:
    """Open two models as `open_pair`, also of an architecture that only transformers knows."""
    try:
        pair = open_pair(a, b)
    except UnsupportedError:
        first = _by_tensors(a)
        second = _by_tensors(b)
        if first is None or second is None or not (_runs(first) and _runs(second)):
            raise
        pair = first, second
    # One of the models may have its experts in one tensor, the other in a tensor for each linear.
    for source in pair:
        unstack(source)
    return pair


def _version() -> str:
    return f"transformers {importlib.metadata.version('transformers')}"


def _by_tensors(path: str | Path, weights: WeightKind | None = None) -> StoredCheckpoint | None:
    """Open a model by its tensors only; None if it cannot be opened in this way."""
    # Damage is an error in any case, so `CheckpointError` is not caught.
    try:
        return open_checkpoint(path, weights, tensors_only=True)
    except UnreadLayoutError:
        raise
    except (RequestError, UnsupportedError):
        return None


def _runs(source: StoredCheckpoint) -> bool:
    """Check that transformers is installed, and that it knows the architecture or config.json names
    code.
    """
    if not is_installed():
        return False
    return code_file(source.extra_config) is not None or is_known(source.extra_config)


def _require_installed_for(source: StoredCheckpoint) -> None:
    """Raise a `RequestError` unless transformers is installed, which runs architectures for which
    quantkit has no decoder.
    """
    if not is_installed():
        raise RequestError(
            "transformers must be installed to run this architecture",
            path=source.path,
            found=source.config.architecture,
            hint=(
                Message(
                    "pip install 'quantkit[transformers]'; or ",
                    Option("tensors_only", value=True, job="convert"),
                    ", or of quantize, reads its tensors without running it",
                )
            ),
        )


def why_not_run(error: QuantkitError) -> str:
    """Explain why transformers does not run a model."""
    if error.hint and isinstance(error, RequestError):
        return f"{error.problem}; {error.hint}"
    return error.problem


def passage_of(checkpoint: Checkpoint) -> Passage[LazyModel]:
    """Build the model of a checkpoint that transformers runs, or reuse the one that was built; with
    `RoundedInputs`, it rounds the inputs of these linears.

    Raises `UnsupportedError` or `CheckpointError` if transformers cannot run it.
    """
    # It needs transformers, which is optional.
    from quantkit.passes.passage import Passage
    from quantkit.via_transformers.lazy_model import LazyModel

    passage: Passage[LazyModel] | None = getattr(checkpoint, _PASSAGE, None)
    if passage is None:
        lazy = LazyModel(checkpoint)
        if isinstance(checkpoint, RoundedInputs):
            from quantkit.via_transformers.rounded_products import round_product_inputs

            round_product_inputs(lazy, checkpoint.inputs)
        passage = Passage(lazy, checkpoint.path)
        setattr(checkpoint, _PASSAGE, passage)
    return passage
