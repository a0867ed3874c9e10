"""Text to token ids as a measurement reads it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from quantkit.errors import CheckpointError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.folder import checked_tokenizer
from quantkit.text.export import export_json
from quantkit.text.tokenizer import Tokenizer, load_tokenizer


def measuring_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """A checkpoint's tokenizer; for sentencepiece, what `convert` would write instead of it.

    A text may spell special tokens, as WikiText does with ``<unk>``. transformers takes
    them for the tokens, and so must what is measured beside it; sentencepiece cannot.

    Raises:
        CheckpointError: if there is none, it is damaged, or it knows more tokens than the embedding.
    """
    tokenizer = checked_tokenizer(checkpoint)[0] or load_tokenizer(checkpoint.path)
    if tokenizer.kind != "sentencepiece":
        return tokenizer
    with tempfile.TemporaryDirectory(prefix="quantkit-tokenizer-") as scratch:
        exported = export_json(checkpoint.path / "tokenizer.model", Path(scratch))
        return tokenizer if exported is None else load_tokenizer(scratch)


def token_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids as transformers gives them: BOS first where the model expects it, spelled special tokens taken for such."""
    return tokenizer.encode(text, specials=True)


def prefix_token(tokenizer: Tokenizer, checkpoint: Checkpoint) -> int:
    """What the first token of a text is predicted from: BOS, or EOS in a model without.

    Raises:
        CheckpointError: if the tokenizer has neither.
    """
    found = [token for token in (tokenizer.bos_id, *tokenizer.eos_ids) if token is not None]
    if not found:
        raise CheckpointError("the tokenizer has neither BOS nor EOS", path=checkpoint.path)
    return found[0]
