"""The names of llama.cpp's mixes of types, such as Q4_K_M; `jobs.quantize.gguf_mix` knows which
tensors get which.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.tensors.scheme import (
    IQ4_NL,
    IQ4_XS,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    QuantScheme,
)


@dataclass(frozen=True)
class Mix:
    """A mix of types.

    Attributes:
        name: llama.cpp's, in lower case.
        default: of most linears, and of an embedding that is not tied to the head.
        file_type: llama.cpp's number for a file of this mix, ``general.file_type`` (`llama_ftype`).
    """

    name: str
    default: QuantScheme
    file_type: int


_ALL = (
    Mix("q2_k", Q2_K, 10),
    Mix("q3_k_s", Q3_K, 11),
    Mix("q3_k_m", Q3_K, 12),
    Mix("q3_k_l", Q3_K, 13),
    Mix("q4_k_s", Q4_K, 14),
    Mix("q4_k_m", Q4_K, 15),
    Mix("q5_k_s", Q5_K, 16),
    Mix("q5_k_m", Q5_K, 17),
    Mix("q6_k", Q6_K, 18),
    Mix("iq4_nl", IQ4_NL, 25),
    Mix("iq4_xs", IQ4_XS, 30),
    Mix("q4_0", Q4_0, 2),
    Mix("q4_1", Q4_1, 3),
    Mix("q5_0", Q5_0, 8),
    Mix("q5_1", Q5_1, 9),
    Mix("q8_0", Q8_0, 7),
)
MIXES = {mix.name: mix for mix in _ALL}
"""By the names that a user may request instead of a scheme."""
# llama.cpp takes the medium mix for a name without a size.
_SHORT = {"q3_k": MIXES["q3_k_m"], "q4_k": MIXES["q4_k_m"], "q5_k": MIXES["q5_k_m"]}


def find_mix(scheme: object) -> Mix | None:
    """Find the mix of a name, in whatever case; ``q4_k`` is ``q4_k_m``, as for llama.cpp.

    None for anything else.
    """
    if not isinstance(scheme, str):
        return None
    name = scheme.strip().lower()
    return MIXES.get(name, _SHORT.get(name))
