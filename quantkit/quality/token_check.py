"""Do two checkpoints read texts as the same tokens, and begin and end them alike?"""

from __future__ import annotations

from quantkit.data.files import gate_texts
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.folder import checked_tokenizer
from quantkit.formats.registry import CONTAINERS
from quantkit.json_values import read_json
from quantkit.text.compare import first_difference, vocabulary_texts


def token_problems(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Where the two would read a text as other tokens, or end a generation at others."""
    problems = []
    for what, tokens in (("begin", _begin_tokens), ("end", _end_tokens)):
        own, others = tokens(a), tokens(b)
        stated = all(CONTAINERS[one.format].states_tokens for one in (a, b))
        agree = own == others if stated else own <= others or others <= own
        if not agree:
            problems.append(f"the tokens that {what} a text differ: {_listed(own)} against {_listed(others)}")
    first, second = checked_tokenizer(a)[0], checked_tokenizer(b)[0]
    if first is None or second is None:
        if first is not second:
            problems.append(f"{(a if first is None else b).path} has no tokenizer")
    else:
        text = first_difference(first, second, (*gate_texts().values(), *vocabulary_texts(first)))
        if text is not None:
            problems.append(f"tokenizers differ on {text[:40]!r}")
    return problems


def _listed(tokens: set[int]) -> str:
    return ", ".join(map(str, sorted(tokens))) or "none"


def _begin_tokens(checkpoint: Checkpoint) -> set[int]:
    token = checkpoint.config.bos_token_id
    return set() if token is None else {token}


def _end_tokens(checkpoint: Checkpoint) -> set[int]:
    """The end tokens of the config and, where it says some, of generation_config.json.

    A Meta folder states none: they are those of its tokenizer, which may know more or fewer than a model uses.
    """
    found = set(checkpoint.config.eos_token_ids)
    path = checkpoint.path / "generation_config.json"
    stated = read_json(path).get("eos_token_id") if path.is_file() else None
    return found | {token for token in (stated if isinstance(stated, list) else [stated]) if isinstance(token, int)}
