"""Continue texts with a model that transformers runs: a single prompt slowly, as every new token
reads the whole text again; rows of equal length with transformers' own cache.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Unpack

import torch

from quantkit.base.memory import enough_memory
from quantkit.base.progress import Progress, silent
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.run_memory import measure_by_transformers
from quantkit.passes.passage import convert_model_errors
from quantkit.runtime.generation_config import end_tokens
from quantkit.runtime.request import MAX_NEW_TOKENS, Request, TokenIds, create_request, prompt_ids
from quantkit.runtime.rows import Choose, require_room
from quantkit.runtime.sampling import Sampler
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.tensors.finite import require_finite_logits
from quantkit.via_transformers.cached_attention import rounding_cache
from quantkit.via_transformers.forward import passage_of
from quantkit.via_transformers.generation import generate_rows
from quantkit.via_transformers.linears import quiet


class TransformersModel:
    """A model of transformers with all its weights in memory, in float32 on the CPU.

    Attributes:
        config: of the model, with its end tokens.
        memory: what it takes to run.
    """

    def __init__(self, checkpoint: Checkpoint, *, progress: Progress = silent) -> None:
        """Load all weights of the checkpoint.

        Args:
            checkpoint: that transformers runs, see `open_to_run`.

        Raises:
            RequestError: if its weights do not fit in memory.
            CheckpointError: for a damaged generation_config.json.
        """
        require_room(checkpoint, torch.device("cpu"))
        self.memory = measure_by_transformers(checkpoint)
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

    def __enter__(self) -> TransformersModel:
        return self

    def __exit__(self, *error: object) -> None:
        """Free the weights: other passes through the checkpoint load them part by part."""
        for part in self._lazy.parts:
            self._lazy.unload(part)

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

    def write_rows(self, first: torch.Tensor, length: int, choose: Choose) -> torch.Tensor:
        """Continue rows; see `RowWriter`.

        Raises the errors of `generate_rows`, and `NonFiniteError` if the logits are NaN or Inf.
        """

        def choose_finite(logits: torch.Tensor) -> torch.Tensor:
            return choose(require_finite_logits(logits, self._path))

        return generate_rows(self._lazy, self._path, first, length, choose_finite)
