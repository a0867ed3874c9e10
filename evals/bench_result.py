"""The result of `bench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from quantkit.evals.timing import AtContext, LeftOut, Rate, prefill_rates

# Cores that other processes may use in addition to the threads that compute.
_IDLE_CORES = 0.3


@dataclass(frozen=True)
class Bench:
    """The figures of one model, measured in a separate process.

    Attributes:
        name: the folder's, or the shape's.
        quantized: whether any layer is.
        backends: of the quantized layers.
        dtype: of activations in prefill.
        device: the CPU, or the vendor's name of the GPU.
        threads: of the CPU.
        cores: of the machine.
        other_load: cores that other processes used meanwhile; None if not measured.
        load_seconds: from files to a model ready to run.
        first_token_seconds: from a prompt of `PROMPT` tokens to its first new token, on the first
            attempt, and the median of later ones.
        prefill: by tokens of the prompt.
        decode: by batch size; the tokens of all sequences count.
        one_thread: one sequence on a single thread, if the weights are small; None if not measured.
        weight_bytes: read for each step of decoding.
        bandwidth: bytes a second that the same threads read from memory, or that the GPU copies,
            read and written together; measured afterwards.
        peak_bytes: peak memory of the process, or on the GPU.
        cache_dtype: of keys and values.
        loaded_bytes: of all weights in memory.
        run_bytes, cache_bytes_per_token: what was stated before loading, see `quantkit.Inspection`.
        at_contexts: decoding with long contexts, if requested.
        left_out: the contexts that could not be measured, and why.
        price_per_hour: of all hardware that computes here, in any currency; None if unknown.
    """

    name: str
    quantized: bool
    backends: list[str]
    dtype: str
    device: str
    threads: int
    cores: int
    other_load: float | None
    load_seconds: float
    first_token_seconds: tuple[float, float]
    prefill: dict[int, Rate]
    decode: dict[int, Rate]
    one_thread: Rate | None
    weight_bytes: int
    bandwidth: float
    peak_bytes: int
    cache_dtype: str
    loaded_bytes: int
    run_bytes: int
    cache_bytes_per_token: int
    at_contexts: list[AtContext] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    price_per_hour: float | None = None

    @property
    def share_of_bandwidth(self) -> float | None:
        """Compute the share of the bandwidth that reading weights uses when one sequence is
        decoded; None if not measured.
        """
        # Each token of one sequence reads all weights once.
        if 1 in self.decode:
            return self.decode[1].median * self.weight_bytes / self.bandwidth
        return None

    @property
    def busy(self) -> bool:
        """Return whether other processes used cores that this one needed."""
        if self.other_load is None:
            return False
        # On a GPU, only the thread that starts its kernels needs a core.
        if self.device == "cpu":
            needed = self.threads
        else:
            needed = 1
        return self.other_load + needed > self.cores + _IDLE_CORES

    def cost(self, tokens_per_second: float) -> float | None:
        """Compute the cost of a thousand tokens at a rate; None without a price."""
        if self.price_per_hour is None:
            return None
        return 1000 * self.price_per_hour / (3600 * tokens_per_second)

    def to_json(self) -> dict[str, Any]:
        """Collect all figures, in tokens a second, seconds and bytes, and with a price the cost of
        a thousand tokens.
        """
        has_price = self.price_per_hour is not None
        at_contexts = []
        for at_context in self.at_contexts:
            # Properties are not fields: `asdict` leaves them out.
            value = {**asdict(at_context), "each": at_context.sequence_rate}
            if has_price:
                value["cost_of_thousand_tokens"] = self.cost(at_context.together.median)
            at_contexts.append(value)
        prefill_at_contexts = prefill_rates(self.at_contexts)
        values = {
            **asdict(self),
            "share_of_bandwidth": self.share_of_bandwidth,
            "busy": self.busy,
            "at_contexts": at_contexts,
            "prefill_at_contexts": _convert_rates(prefill_at_contexts, asdict),
        }
        if has_price:

            def compute_cost(rate: Rate) -> float | None:
                return self.cost(rate.median)

            values["cost_of_thousand_tokens"] = {
                "prefill": _convert_rates(self.prefill, compute_cost),
                "decode": _convert_rates(self.decode, compute_cost),
                "prefill_at_contexts": _convert_rates(prefill_at_contexts, compute_cost),
            }
        return values


def _convert_rates(rates: Mapping[int, Rate], convert: Callable[[Rate], Any]) -> dict[int, Any]:
    """Apply a function to the rate of each length, batch or context."""
    return {key: convert(rate) for key, rate in rates.items()}
