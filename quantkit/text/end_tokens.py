"""Find the tokens at which a model ends: one rule for folders, GGUF files, and everything that is
written.

A model ends at the tokens that its config.json and generation_config.json list, and at the EOS
token that its tokenizer names, as in vLLM. A GGUF file lists them under its keys for EOS, end of
turn and end of message. None is guessed from the spelling of a token: ``</s>`` is an HTML tag in
Gemma's vocabulary, and an ordinary token in Qwen's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.base.json_values import Settings, read_json, read_settings
from quantkit.base.late import LateModule
from quantkit.text.special_tokens import find_bos_eos_ids, special_tokens

if TYPE_CHECKING:
    from quantkit.text import sentencepiece_file, template_process, tiktoken_file
else:
    sentencepiece_file = LateModule("quantkit.text.sentencepiece_file")
    template_process = LateModule("quantkit.text.template_process")
    tiktoken_file = LateModule("quantkit.text.tiktoken_file")

_ANSWER = "quantkit-answer"
_CONVERSATION = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER}]


def list_end_tokens(folder: Path) -> list[int]:
    """List the end tokens that a folder's files name, without doubles.

    Raises:
        CheckpointError: if config.json or generation_config.json is damaged or lists something
            other than ids, or a file of the tokenizer is damaged.
    """
    # A dict keeps the order of the files, the config's tokens first.
    end_tokens: dict[int, None] = {}
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.is_file():
            end_tokens |= dict.fromkeys(Settings(read_settings(path), path).ids("eos_token_id"))
    eos = tokenizer_eos(folder)
    if eos is not None:
        end_tokens[eos] = None
    return list(end_tokens)


def tokenizer_eos(folder: Path) -> int | None:
    """Find the EOS token that the files of a folder's tokenizer name, if there is one.

    The files are read without loading the tokenizer, which takes longer.

    Raises:
        CheckpointError: if a file is damaged.
    """
    if (folder / "tokenizer.json").is_file():
        return _eos_of_json(folder)
    path = folder / "tokenizer.model"
    # Meta's tiktoken files have their end tokens in the config.
    if not path.is_file() or tiktoken_file.is_tiktoken(path):
        return None
    model = sentencepiece_file.read_sentencepiece(path)
    pieces: dict[str, int] = {}
    for number, (spelling, _, _) in enumerate(model.pieces):
        pieces[spelling] = number
    # The settings next to the model win over the model's own EOS, whose id is negative if it has
    # none.
    eos = find_bos_eos_ids(folder, pieces).get("eos_token", model.ids["eos"])
    if eos < 0:
        return None
    return eos


def _eos_of_json(folder: Path) -> int | None:
    # tokenizer_config.json lists ids too, which transformers and its library ignore: only those of
    # this file count.
    path = folder / "tokenizer.json"
    raw = Settings(read_json(path), path)
    vocabulary = raw.inside("model").values.get("vocab")
    if isinstance(vocabulary, dict):
        ids: dict[str, int] = dict(vocabulary)
    else:
        ids = {}
    added = raw.values.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if not isinstance(token, dict):
            continue
        spelling = token.get("content")
        number = token.get("id")
        if isinstance(spelling, str) and isinstance(number, int):
            ids[spelling] = number
    eos = special_tokens(folder, ids, ("eos_token",)).get("eos_token")
    if eos is None:
        return None
    return ids.get(eos)


def find_answer_end(
    source: str, names: Mapping[str, str | None], specials: Mapping[str, int], ends: Collection[int]
) -> int | None:
    """Render a short conversation to find the special token that a chat template puts right after
    an answer, if the model does not end there anyway.

    Converters of GGUF files leave it out where llama.cpp recognizes it by its spelling, such as
    Gemma's ``<end_of_turn>``; without it a conversation would go on for ever.

    Args:
        source: the template in Jinja.
        names: spellings of special tokens by their names in templates, such as ``eos_token``.
        specials: ids of the special tokens by their spelling.
        ends: the tokens at which the model ends anyway. If the template spells one of them, it is
            not run.
    """
    if "eos_token" in source:
        return None
    for spelling, number in specials.items():
        if number in ends and spelling in source:
            return None
    variables = {**names, "messages": _CONVERSATION, "tools": None, "add_generation_prompt": False}
    answer = template_process.render(
        source, variables, (), template_process.Budget(repeatable=True)
    )
    # The rendering of a user's conversation reports the error.
    if "error" in answer:
        return None
    _, printed_answer, text_after = str(answer["text"]).rpartition(_ANSWER)
    # The template does not print the answer.
    if not printed_answer:
        return None
    following: list[str] = []
    for spelling in specials:
        if spelling and text_after.lstrip().startswith(spelling):
            following.append(spelling)
    if following:
        # One spelling may begin with another: the longer one is the token.
        return specials[max(following, key=len)]
    return None
