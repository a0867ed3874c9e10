"""Continue a prompt with a model that transformers runs: slowly, as every new token reads the
whole text again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Unpack

import torch

from quantkit.base.memory import available_bytes, enough_memory, size_text
from quantkit.base.progress import Progress, silent
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint, parameter_count
from quantkit.passes.passage import convert_model_errors
from quantkit.runtime.generation_config import end_tokens
from quantkit.runtime.request import MAX_NEW_TOKENS, Request, TokenIds, create_request, prompt_ids
from quantkit.runtime.sampling import Sampler
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.tensors.finite import require_finite_logits
from quantkit.via_transformers.cached_attention import rounding_cache
from quantkit.via_transformers.forward import passage_of
from quantkit.via_transformers.linears import quiet


class TransformersModel:
    """A model of transformers with all its weights in memory, in float32 on the CPU.

    Attributes:
        config: of the model, with its end tokens.
    """

    def __init__(self, checkpoint: Checkpoint, *, progress: Progress = silent) -> None:
        """Load all weights of the checkpoint.

        Args:
            checkpoint: that transformers runs, see `open_to_run`.

        Raises:
            RequestError: if its weights do not fit in memory.
            CheckpointError: for a damaged generation_config.json.
        """
        # float32 takes four bytes per parameter, whatever the checkpoint stores.
        required_bytes = 4 * parameter_count(checkpoint)
        free_bytes = available_bytes()
        if required_bytes > free_bytes:
            problem = "does not fit in memory as float32"
            expected = f"at most {size_text(free_bytes)}"
            raise RequestError(
                problem, path=checkpoint.path, found=size_text(required_bytes), expected=expected
            )
        self._path = checkpoint.path
        self._checkpoint = checkpoint
        self._lazy = passage_of(checkpoint).partwise
        # generation_config.json and the tokenizer may name more end tokens than the config.
        config = replace(checkpoint.config, eos_token_ids=self._lazy.end_tokens)
        self.config = replace(config, eos_token_ids=end_tokens(checkpoint.path, config))
        parts = self._lazy.parts
        for index, part in enumerate(parts):
            progress("weights", index, len(parts), "parts")
            # The size above counts parameters only; loading a part may allocate more.
            with enough_memory(checkpoint.path):
                self._lazy.load(part)
        progress("weights", len(parts), len(parts), "parts")

    def generate(
        self,
        ids: TokenIds,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[int, None, None]:
        """Continue a prompt, as `quantkit.generate` does.

        Raises the errors of `quantkit.generate`, and `UnsupportedError` if the code of the model
        fails.
        """
        request = create_request(self.config, prompt_ids(ids), max_new_tokens, sampling)
        sampler = Sampler(
            request.sampling, request.prompt, self.config.vocab_size, torch.device("cpu")
        )
        return self._new_tokens(request, sampler.draw)

    def _new_tokens(
        self, request: Request, draw: Callable[[torch.Tensor], torch.Tensor]
    ) -> Generator[int, None, None]:
        """Run the model on the whole text for each new token, until an end token."""
        tokens = list(request.prompt)
        with rounding_cache(self._checkpoint, self._lazy):
            for _ in range(request.max_new_tokens):
                with torch.inference_mode(), quiet(), convert_model_errors(self._path):
                    # This backend keeps no cache: each new token recomputes the whole text.
                    output = self._lazy.model(input_ids=torch.tensor([tokens]), use_cache=False)
                    last_logits = output.logits[:, -1]
                    token = int(draw(require_finite_logits(last_logits, self._path)))
                if token in self.config.eos_token_ids:
                    return
                tokens.append(token)
                yield token
