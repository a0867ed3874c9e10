"""Do two checkpoints read texts and conversations as the same tokens, and begin and end them alike?"""

from __future__ import annotations

from quantkit.data.files import gate_texts
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.folder import checked_tokenizer
from quantkit.formats.registry import CONTAINERS
from quantkit.json_values import shown
from quantkit.runtime.generation_config import end_tokens
from quantkit.text.added_elsewhere import stated_elsewhere
from quantkit.text.chat_template import ChatTemplates
from quantkit.text.compare import first_difference


def token_problems(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Where the two would read a text or a conversation as other tokens, or end a generation at others."""
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
        difference = first_difference(first, second, gate_texts().values())
        if difference is not None:
            problems.append(f"tokenizers differ on {difference}")
        problems += _config_problems(a, b)
    return problems + _template_problems(a, b)


def _config_problems(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Where only tokenizer_config.json differs, which readers of tokenizer.json alone do not look at."""
    if not all((one.path / "tokenizer.json").is_file() for one in (a, b)):
        return []
    own, others = stated_elsewhere(a.path), stated_elsewhere(b.path)
    differing = sorted(key for key in {*own, *others} if own.get(key) != others.get(key))
    if not differing:
        return []
    key = differing[0]
    return [f"tokenizer_config.json differs: {key} {shown(own.get(key))} against {shown(others.get(key))}"]


def _listed(tokens: set[int]) -> str:
    return ", ".join(map(str, sorted(tokens))) or "none"


def _begin_tokens(checkpoint: Checkpoint) -> set[int]:
    token = checkpoint.config.bos_token_id
    return set() if token is None else {token}


def _end_tokens(checkpoint: Checkpoint) -> set[int]:
    """Those that end a generation. A Meta folder states none: they are those of its tokenizer, which may know more or
    fewer than a model uses."""
    return set(end_tokens(checkpoint.path, checkpoint.config))


def _template_problems(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Where the two are told conversations in other words; a Meta folder need not have a template."""
    own, others = ChatTemplates(a.path).sources, ChatTemplates(b.path).sources
    for one, templates in ((a, own), (b, others)):
        if not templates and (own or others):
            stated = CONTAINERS[one.format].states_tokens
            return [f"{one.path} has no chat template, the other has"] if stated else []
    differing = [name for name in sorted({*own, *others}) if own.get(name) != others.get(name)]
    return [f"the chat templates differ: {', '.join(differing)}"] if differing else []
