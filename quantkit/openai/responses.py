"""Complete responses of the chat completions and the completions API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.openai.chat import build_chat_choice
from quantkit.openai.completions import build_text_choice
from quantkit.openai.logprobs import TokenNames
from quantkit.openai.request import ApiRequest
from quantkit.prompts.prompt import Prompt
from quantkit.runtime.request import Completion
from quantkit.runtime.token_texts import TokenTexts


@dataclass(frozen=True)
class ResponseBuilder:
    """Builds the response to one request.

    Attributes:
        prompts: of the request.
        request_id: from which the identifiers of the response and of calls are made.
        model: the name of the model that answers.
        created: in seconds since 1970.
    """

    request: ApiRequest
    prompts: Sequence[Prompt]
    texts: TokenTexts
    request_id: str
    model: str
    created: int = 0

    @property
    def num_choices(self) -> int:
        """Count the continuations of all prompts."""
        return sum(prompt.request.samples for prompt in self.prompts)

    @property
    def token_names(self) -> TokenNames:
        """Return the names of tokens in log-probabilities."""
        return TokenNames(self.texts, as_ids=self.request.tokens_as_ids)

    def build(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Build the response with all continuations, which may be in any order."""
        # Choices are in the order of prompts and samples, whichever ended first.
        ordered = sorted(completions, key=lambda completion: (completion.prompt, completion.sample))
        names = self.token_names
        choices: list[dict[str, Any]] = []
        for index, completion in enumerate(ordered):
            prompt = self.prompts[completion.prompt]
            if self.request.is_chat:
                choice = build_chat_choice(index, prompt, completion, names, self.request_id)
            else:
                choice = build_text_choice(index, prompt, completion, names)
            choices.append(choice)
        return {**self.build_head(), "choices": choices, "usage": self.count_usage(completions)}

    def build_head(self, *, is_chunk: bool = False) -> dict[str, Any]:
        """Build the fields that the response and all chunks of a stream share."""
        if self.request.is_chat:
            prefix = "chatcmpl"
            object_name = "chat.completion"
            if is_chunk:
                object_name += ".chunk"
        else:
            # Chunks of completions are named as complete ones.
            prefix = "cmpl"
            object_name = "text_completion"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": object_name,
            "created": self.created,
            "model": self.model,
        }

    def count_usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Count the tokens of prompts, each once, and of their continuations."""
        prompt_tokens = 0
        new_tokens = 0
        reasoning_tokens = 0
        has_reasoning = False
        for completion in completions:
            prompt = self.prompts[completion.prompt]
            # An echoed prompt is a part of the text, but its tokens are not new.
            tokens = prompt.get_new_tokens(completion)
            new_tokens += len(tokens)
            # All samples of a prompt share its tokens.
            if completion.sample == 0:
                prompt_tokens += completion.prompt_tokens
            if prompt.form is not None and prompt.form.reasoning is not None:
                has_reasoning = True
                reasoning_tokens += prompt.form.count_reasoning_tokens(tokens)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
        }
        # The API counts reasoning among the new tokens, and states its share.
        if has_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
        return usage
