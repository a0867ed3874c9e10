"""The interface of Meta's own code, of its repositories ``llama`` (Llama 2) and ``llama3``."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, TypeVar

import torch

from quantkit.base.arguments import (
    as_integer,
    as_path,
    as_seed,
    as_string,
    is_several,
    require_flags,
    wrong_type,
)
from quantkit.distributed.group import count_processes, join_until_exit, lost_as_error
from quantkit.errors import RequestError
from quantkit.formats.folder import require_rows
from quantkit.jobs.inference.load import open_runnable_checkpoint
from quantkit.kernels import BackendName
from quantkit.kernels.dispatch import require_backend
from quantkit.model.device import to_torch_dtype
from quantkit.model.load import load_model
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate_batch import completions
from quantkit.runtime.request import (
    Request,
    TokenIds,
    check_total_length,
    create_request,
    prompt_ids,
)
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.tensors.dtypes import FloatName, float_name
from quantkit.text.chat import Chat, Llama2Chat, Llama3Chat, llama2_tag
from quantkit.text.chat_template import ChatMessage
from quantkit.text.tokenizer import (
    JsonTokenizer,
    Tokenizer,
    load_original_tokenizer,
    load_tokenizer,
)

T = TypeVar("T")
REFUSED = "Error: special tags are not allowed as part of the prompt."
"""The answer to a conversation that spells tags of Llama 2's format; scripts for Meta's code
compare with it.
"""


class _Details(TypedDict, total=False):
    """With `logprobs`: tokens, each as text, and the logarithms of their probabilities."""

    tokens: list[str]
    logprobs: list[float]


class CompletionPrediction(_Details):
    """What follows a prompt."""

    generation: str


class ChatPrediction(_Details):
    """An answer: ``{"role": "assistant", "content": "..."}``."""

    generation: ChatMessage


class Llama:
    """A Llama model behind the interface of Meta's own code; `Llama.build` makes one.

    Arguments and results are those of Meta's class, on any checkpoint that quantkit reads: original
    shards, Hugging Face folders, quantized or not. Under ``torchrun`` the processes share the
    model, however many shards it has on disk, and each is given the results. docs/generation.md
    says what little differs. Calls from several threads run one after the other.

    Attributes:
        model, tokenizer: as `quantkit.load` gives them.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, max_seq_len: int, seed: int) -> None:
        """Use `Llama.build`."""
        self.model = engine.model
        self.tokenizer = tokenizer
        self._engine = engine
        self._max_seq_len = max_seq_len
        self._seeds = random.Random(seed)
        self._turn = threading.Lock()

    @staticmethod
    def build(
        ckpt_dir: str | Path,
        tokenizer_path: str | Path,
        max_seq_len: int,
        max_batch_size: int,
        model_parallel_size: int | None = None,
        seed: int = 1,
        *,
        device: str | torch.device | None = None,
        dtype: FloatName | torch.dtype | None = None,
        backend: BackendName | None = None,
        allow_slow: bool = False,
    ) -> Llama:
        """Load a model.

        Args:
            ckpt_dir: a Meta or Hugging Face folder, quantized or not.
            tokenizer_path: a ``tokenizer.model`` or ``tokenizer.json``, or a folder that has one.
            max_seq_len: tokens of a prompt and its continuation together, at most.
            max_batch_size: prompts at a time, at most.
            model_parallel_size: the number of processes, which share the model; None is as many as
                there are.
            seed: of all draws, one after the other; the same in all processes.
            device, dtype, backend, allow_slow: see `quantkit.load`.

        Returns:
            The model, ready to generate.

        Raises:
            CheckpointError: if the folder is damaged, or the tokenizer is another model's.
            RequestError: for numbers out of range, or another number of processes, or without
                kernels.
            GroupError: if the processes differ in their arguments.
        """
        path = as_path("ckpt_dir", ckpt_dir)
        tokenizer_path = as_path("tokenizer_path", tokenizer_path)
        length = as_integer("max_seq_len", max_seq_len)
        slots = as_integer("max_batch_size", max_batch_size)
        seed = as_seed("seed", seed)
        float_dtype = to_torch_dtype(dtype)
        require_flags(allow_slow=allow_slow)
        if backend is not None:
            require_backend(as_string("backend", backend))
        if slots < 1:
            raise RequestError("max_batch_size must be at least 1", found=slots)
        # Only headers are read here, so that the remaining arguments are checked before weights
        # are read.
        checkpoint = open_runnable_checkpoint(path, None, float_name(dtype))
        context = checkpoint.config.max_positions
        if not 1 <= length <= context:
            raise RequestError(
                "max_seq_len is out of range", found=length, expected=f"1 to {context}"
            )
        tokenizer = _tokenizer(tokenizer_path)
        require_rows(tokenizer, checkpoint.config.vocab_size, tokenizer_path)
        # Before the processes join: one that fails while they do leaves the others without an
        # explanation.
        processes = count_processes()
        if (
            model_parallel_size is not None
            and as_integer("model_parallel_size", model_parallel_size) != processes
        ):
            raise RequestError(
                "model_parallel_size differs from the number of processes",
                found=model_parallel_size,
                expected=processes,
                hint="start this many processes with torchrun, or omit it",
            )
        group = join_until_exit(device)
        group.require_same({"max_seq_len": length, "max_batch_size": slots, "seed": seed})
        model = load_model(
            checkpoint,
            device=group.device or device,
            dtype=float_dtype,
            backend=backend,
            allow_slow=allow_slow,
            group=group,
        )
        ends = dict.fromkeys((*model.config.eos_token_ids, *tokenizer.eos_ids))
        # In Meta's folders only the tokenizer states end tokens.
        model.config = replace(model.config, eos_token_ids=tuple(ends))
        return Llama(Engine(model, length, slots=slots), tokenizer, length, seed)

    def generate(
        self,
        prompt_tokens: Sequence[TokenIds],
        max_gen_len: int,
        temperature: float = 0.6,
        top_p: float = 0.9,
        logprobs: bool = False,
        echo: bool = False,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Continue prompts, up to an end token, which is not given out.

        Args:
            prompt_tokens: token ids of each prompt; up to `max_batch_size` prompts.
            max_gen_len: new tokens of each at most; fewer where `max_seq_len` leaves no room for
                them.
            temperature: 0 takes the likeliest token.
            top_p: draw from the likeliest tokens, up to the one with which their probabilities
                together exceed this.
            logprobs: return the logarithms of the tokens' probabilities, as they are at temperature
                1.
            echo: let the results begin with the prompts; a first token has the log-probability 0,
                and if a prompt holds an end token, the result ends before it.

        Returns:
            The token ids of each prompt's continuation, and their log-probabilities or None.

        Raises:
            RequestError: for more prompts, or a longer one, than the model was built for; or as
                `quantkit.generate` does.
            NonFiniteError: if the model's logits are NaN or Inf.
        """
        require_flags(logprobs=logprobs, echo=echo)
        if not is_several(prompt_tokens):
            raise wrong_type("prompt_tokens", prompt_tokens, "several prompts in a list")
        prompts = [prompt_ids(prompt_token) for prompt_token in prompt_tokens]
        count = as_integer("max_gen_len", max_gen_len)
        sampling = _sampling(temperature, top_p)
        if count < 0:
            raise RequestError("max_gen_len must not be negative", found=count)
        if len(prompts) > self._engine.slots:
            raise RequestError(
                "more prompts than the model was built for",
                found=len(prompts),
                expected=f"at most {self._engine.slots}",
                hint="pass a larger `max_batch_size` to `Llama.build`",
            )
        # Prompts that get no new tokens make no request, and keep these results.
        tokens: list[list[int]] = []
        token_logprobs: list[list[float]] = []
        for prompt in prompts:
            tokens.append(prompt if echo else [])
            token_logprobs.append([])
        requests: dict[int, Request] = {}
        # The lock also covers the seeds: a call draws its seeds one after the other.
        with self._turn:
            for number, prompt in enumerate(prompts):
                if len(prompt) > self._max_seq_len:
                    raise RequestError(
                        f"prompt {number} is longer than max_seq_len",
                        found=len(prompt),
                        expected=self._max_seq_len,
                        hint=(
                            "use a shorter prompt, or pass a larger `max_seq_len` to `Llama.build`"
                        ),
                    )
                new = min(count, self._max_seq_len - len(prompt))
                # Also for prompts without a request, so that the seeds of others stay the same.
                seed = self._seeds.getrandbits(64)
                check_total_length(self.model.config, prompt, new)
                if new or (logprobs and echo):
                    requests[number] = create_request(
                        self.model.config,
                        prompt,
                        new,
                        {**sampling, "seed": seed},
                        logprobs=0 if logprobs else None,
                        echo=echo,
                    )
            with lost_as_error():
                numbers = list(requests)
                for completion in completions(
                    self._engine, list(requests.values()), None, [()] * len(requests)
                ):
                    number = numbers[completion.prompt]
                    tokens[number] = completion.token_ids
                    if completion.logprobs is not None:
                        # Nothing predicts the first token of a prompt. Meta's code gives it 0.
                        values = [value or 0.0 for value in completion.logprobs.tokens]
                        token_logprobs[number] = values
        # Meta's code also ends an echoed prompt at an end token within it.
        end_ids = self.model.config.eos_token_ids
        for number, token_ids in enumerate(tokens):
            stop = _find_end(token_ids, end_ids)
            tokens[number] = token_ids[:stop]
            token_logprobs[number] = token_logprobs[number][:stop]
        return tokens, token_logprobs if logprobs else None

    def text_completion(
        self,
        prompts: Sequence[str],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        echo: bool = False,
    ) -> list[CompletionPrediction]:
        """Continue texts.

        Args:
            prompts: texts; spellings of special tokens in them are plain text.
            max_gen_len: see `generate`; None is `max_seq_len` - 1.
            temperature, top_p, logprobs, echo: see `generate`.

        Returns:
            For each ``{"generation": text}``, with `logprobs` also ``"tokens"`` and ``"logprobs"``.

        Raises:
            RequestError, NonFiniteError: as `generate`.
        """
        ids = [self.tokenizer.encode(prompt) for prompt in _several("prompts", prompts)]
        outputs = self.generate(
            ids, self._max_new_tokens(max_gen_len), temperature, top_p, logprobs, echo
        )
        result: list[CompletionPrediction] = []
        for tokens, values in _pairs(*outputs):
            result.append({"generation": self._text(tokens), **self._details(tokens, values)})
        return result

    def chat_completion(
        self,
        dialogs: Sequence[Sequence[ChatMessage]],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
    ) -> list[ChatPrediction]:
        """Answer conversations, in the format of Llama 3 where the tokenizer has its headers, else
        of Llama 2.

        Args:
            dialogs: conversations of messages ``{"role": "user", "content": "..."}``, a system
                message first if at all; each ends with the user's.
            max_gen_len: see `generate`; None is `max_seq_len` - 1.
            temperature, top_p, logprobs: see `generate`.

        Returns:
            For each ``{"generation": {"role": "assistant", "content": text}}``, with `logprobs`
            also ``"tokens"`` and ``"logprobs"``. Where a message spells tags of Llama 2's format,
            nothing is generated, and the text is `quantkit.jobs.inference.llama.REFUSED`.

        Raises:
            RequestError: for a conversation that the format does not take, or a model that has
                neither; else as `generate`.
            NonFiniteError: as `generate`.
        """
        chat = self._chat()
        # Llama 3 has special tokens for its headers, which no text can spell. Tags of Llama 2 are
        # plain text, so a message that spells them could imitate another role.
        refusals: list[bool] = []
        ids: list[list[int]] = []
        for dialog in _several("dialogs", dialogs):
            messages = list(dialog)
            is_refused = isinstance(chat, Llama2Chat) and llama2_tag(messages) is not None
            refusals.append(is_refused)
            if not is_refused:
                ids.append(chat.encode(messages))
        outputs = self.generate(
            ids, self._max_new_tokens(max_gen_len), temperature, top_p, logprobs
        )
        answers = iter(_pairs(*outputs))
        result: list[ChatPrediction] = []
        for is_refused in refusals:
            tokens: list[int] = []
            values: list[float] | None = [] if logprobs else None
            text = REFUSED
            if not is_refused:
                tokens, values = next(answers)
                text = self._text(tokens)
            details = self._details(tokens, values)
            result.append({"generation": {"role": "assistant", "content": text}, **details})
        return result

    def _max_new_tokens(self, max_gen_len: int | None) -> int:
        if max_gen_len is None:
            return self._max_seq_len - 1
        return max_gen_len

    def _text(self, tokens: Sequence[int]) -> str:
        """Decode as Meta's tokenizers do: Llama 3's spells special tokens out, Llama 2's has no
        spellings of them.
        """
        return self.tokenizer.decode(tokens, specials=self.tokenizer.byte_level)

    def _details(self, tokens: Sequence[int], logprobs: list[float] | None) -> _Details:
        if logprobs is None:
            return {}
        return {"tokens": [self._text([token]) for token in tokens], "logprobs": logprobs}

    def _chat(self) -> Chat:
        if "<|start_header_id|>" in (self.tokenizer.special_tokens or {}):
            return Llama3Chat(self.tokenizer)
        if self.model.config.architecture == "llama" and not self.tokenizer.byte_level:
            return Llama2Chat(self.tokenizer)
        raise RequestError(
            "the model has none of Meta's chat formats",
            found=self.model.config.architecture,
            expected="Llama 2 or Llama 3",
            hint="quantkit.ChatSession uses the folder's own template",
        )


def _tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        return load_tokenizer(path)
    if path.suffix == ".json":
        return JsonTokenizer(path)
    return load_original_tokenizer(path)


def _sampling(temperature: float, top_p: float) -> SamplingOptions:
    """Build the options for Meta's rule: a nucleus of nothing holds the likeliest token, and one
    of all is no less than 1.
    """
    if top_p != 0:
        return {"temperature": temperature, "top_p": top_p}
    return {"temperature": 0.0}


def _find_end(token_ids: Sequence[int], end_ids: Sequence[int]) -> int:
    """Find the position of the first end token; without any, the length."""
    for position, token_id in enumerate(token_ids):
        if token_id in end_ids:
            return position
    return len(token_ids)


def _several(name: str, value: Sequence[T]) -> Sequence[T]:
    # A text is a sequence too, of characters, each of which would be continued.
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise wrong_type(name, value, "several in a list")
    return value


def _pairs(
    tokens: list[list[int]], logprobs: list[list[float]] | None
) -> list[tuple[list[int], list[float] | None]]:
    """Pair the tokens of each prompt with their log-probabilities, or with None."""
    pairs: list[tuple[list[int], list[float] | None]] = []
    for number, token_ids in enumerate(tokens):
        values = None if logprobs is None else logprobs[number]
        pairs.append((token_ids, values))
    return pairs
