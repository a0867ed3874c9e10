"""Read Llama 3's vocabulary files: lines of base64 token and rank."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from quantkit.base.json_values import require_plain_file
from quantkit.errors import CheckpointError
from quantkit.text.contained import convert_library_errors

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NAMED = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
# Reserved tokens fill up the special tokens to this number.
_LLAMA3_SPECIALS = 256
# Bytes or letters; the longest published have some hundred.
LONGEST_TOKEN = 4096
_MAX_TOKENS = 2**22


def is_tiktoken(path: Path) -> bool:
    """Read the first line of a file, and return whether it is a base64 token and its rank; raises
    `CheckpointError` if the file cannot be read.
    """
    with convert_library_errors(path, "cannot be read"), path.open("rb") as file:
        # The first line is enough, and the file may be large and of another kind.
        parts = file.read(4096).split(b"\n", 1)[0].split()
    if len(parts) != 2 or not parts[1].isdigit():
        return False
    try:
        base64.b64decode(parts[0], validate=True)
    except binascii.Error:
        return False
    return True


def read_tiktoken(path: Path) -> dict[bytes, int]:
    """Read byte sequences and their ranks; raises `CheckpointError` if a line is not base64 and a
    number, or ranks have gaps.
    """
    require_plain_file(path)
    ranks: dict[bytes, int] = {}
    with convert_library_errors(path, "cannot be read"):
        lines = path.read_bytes().splitlines()
    if len(lines) > _MAX_TOKENS:
        raise CheckpointError(
            "contains too many tokens",
            path=path,
            found=len(lines),
            expected=f"at most {_MAX_TOKENS}",
        )
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            decoded = base64.b64decode(token, validate=True)
            ranks[decoded] = int(rank)
        except ValueError as error:
            raise CheckpointError(f"line {number} is not 'base64 rank'", path=path) from error
        require_length(len(decoded), path)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError("has missing or duplicate ranks", path=path)
    # Merging begins with single bytes: without all of them some text has no tokens.
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise CheckpointError(
                f"lacks the single byte {byte:#04x}", path=path, expected="all 256"
            )
    return ranks


def llama3_specials(first: int) -> dict[str, int]:
    """Number Llama 3's special tokens, whose ids follow the vocabulary."""
    names = list(_LLAMA3_NAMED)
    num_fillers = _LLAMA3_SPECIALS - len(_LLAMA3_NAMED)
    # The named tokens contain the reserved tokens 0 to 2.
    for i in range(3, 3 + num_fillers):
        names.append(f"<|reserved_special_token_{i}|>")
    return {name: first + i for i, name in enumerate(names)}


def require_length(length: int, path: Path) -> None:
    """Raise a `CheckpointError` for a token that is too long."""
    if length > LONGEST_TOKEN:
        raise CheckpointError(
            "contains a token that is too long",
            path=path,
            found=length,
            expected=f"at most {LONGEST_TOKEN}",
        )
