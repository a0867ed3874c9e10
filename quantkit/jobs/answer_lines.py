"""The result lines of prompts; `quantkit.jobs.generate_file` describes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quantkit.jobs.prompts_file import Prompt
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import Runner
from quantkit.runtime.generate_batch import completions
from quantkit.runtime.request import Completion
from quantkit.text.tokenizer import Tokenizer

Line = Mapping[str, Any]


def answers(
    engine: Engine | Runner[Any], tokenizer: Tokenizer, prompts: Sequence[tuple[int, Prompt]],
    counted: Callable[[int], None],
) -> Iterator[tuple[int, list[Line]]]:  # fmt: skip
    """The lines of each prompt, with its number, as soon as all its continuations have ended.

    Args:
        counted: called after each step with the number of new tokens.
    """
    texts = _TokenTexts(tokenizer)
    requests, stops = [prompt.request for _, prompt in prompts], [prompt.stop for _, prompt in prompts]
    ended: dict[int, list[Completion]] = {}
    for one in completions(engine, requests, tokenizer, stops, counted):
        number, prompt = prompts[one.prompt]
        group = ended.setdefault(number, [])
        group.append(one)
        if len(group) == prompt.request.samples:
            del ended[number]
            group.sort(key=lambda one: one.sample)
            yield number, [_line(number, prompt, one, texts) for one in group]


def _line(number: int, prompt: Prompt, found: Completion, texts: _TokenTexts) -> Line:
    echoed = len(prompt.request.prompt) if prompt.request.echo else 0
    text = found.text or ""
    if prompt.messages and not prompt.request.echo and not texts.byte_level:
        text = text.removeprefix(" ")  # sentencepiece puts it before a word
    line: dict[str, Any] = {
        "index": number, **prompt.known_by, "sample": found.sample, "text": text,
        "finish_reason": found.finish_reason, "stop": found.stop, "prompt_tokens": found.prompt_tokens,
        "completion_tokens": len(found.token_ids) - echoed,
    }  # fmt: skip
    if prompt.truncated:
        line["truncated"] = True
    if prompt.token_ids:
        line["token_ids"] = found.token_ids
    if found.logprobs is not None:
        line["logprobs"] = [
            {**texts.entry(token, value), "top_logprobs": [texts.entry(*one) for one in top.items()]}
            for token, value, top in zip(found.token_ids, found.logprobs.tokens, found.logprobs.top, strict=True)
        ]
    return line


class _TokenTexts:
    """The text of each single token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.byte_level = tokenizer.byte_level
        self._tokenizer = tokenizer
        self._found = {token: text for text, token in (tokenizer.special_tokens or {}).items()}

    def entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._text(token), "token_id": token, "logprob": logprob}

    def _text(self, token: int) -> str:
        if token not in self._found:  # the second of two keeps the space before it
            alone = self._tokenizer.decode([token])
            self._found[token] = self._tokenizer.decode([token, token])[len(alone) :]
        return self._found[token]
