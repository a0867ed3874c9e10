"""A parsed request of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantkit.errors import RequestError
from quantkit.prompts.builder import MAX_CONSTRAINED, PromptBuilder
from quantkit.prompts.errors import restate_errors
from quantkit.prompts.prompt import Prompt, PromptFields

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class ApiRequest:
    """A parsed request of the chat completions or completions API.

    Attributes:
        path: the path of the API.
        model: the model that the request names.
        prompts: of the request, in order.
        names: what the API calls options of a prompt, where its names differ.
        tokens_as_ids: whether log-probabilities name each token by its id.
    """

    path: str
    model: str | None
    prompts: Sequence[PromptFields]
    names: Mapping[str, str]
    tokens_as_ids: bool = False

    @property
    def is_chat(self) -> bool:
        """Tell whether messages are answered; otherwise a text is continued."""
        return self.path == CHAT

    def build_prompts(self, builder: PromptBuilder, place: str | None = None) -> list[Prompt]:
        """Encode the prompts for a model.

        Args:
            place: the file and the line of the request, for errors; None if it is in no file.

        Raises:
            RequestError: as `PromptBuilder.build`, with the API's names of fields, or if there are
                too many answers with a grammar.
            CheckpointError: as `PromptBuilder.load_chat_format`.
        """
        if self.is_chat:
            builder.load_chat_format()
        prompts: list[Prompt] = []
        with restate_errors(place, names=self.names):
            for fields in self.prompts:
                prompt = builder.build(fields)
                _require_few_constrained(prompt, len(self.prompts))
                prompts.append(prompt)
        return prompts


def _require_few_constrained(prompt: Prompt, count: int) -> None:
    """Raise a `RequestError` if there are too many answers with a grammar to `count` prompts such
    as this one.
    """
    answers = prompt.request.samples * count
    if prompt.grammar is not None and answers > MAX_CONSTRAINED:
        raise RequestError(
            "too many answers with a response_format in one request",
            found=answers,
            expected=f"at most {MAX_CONSTRAINED}",
            argument="prompt",
        )
