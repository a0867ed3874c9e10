"""The names of llama.cpp's mixes of types, such as Q4_K_M; `jobs.gguf_mix` knows which tensors get which."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.tensors.scheme import Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, QuantScheme


@dataclass(frozen=True)
class Mix:
    """A mix of types.

    Attributes:
        name: llama.cpp's, in lower case.
        default: of most linears, and of an embedding that is not tied to the head.
    """

    name: str
    default: QuantScheme


_K = {"q3_k": (Q3_K, "sml"), "q4_k": (Q4_K, "sm"), "q5_k": (Q5_K, "sm")}
_ONE_TYPE = {"q6_k": Q6_K, "q4_0": Q4_0, "q4_1": Q4_1, "q5_0": Q5_0, "q5_1": Q5_1, "q8_0": Q8_0}
_ALL = [Mix(f"{name}_{size}", one) for name, (one, sizes) in _K.items() for size in sizes]
_ALL += [Mix(name, one) for name, one in _ONE_TYPE.items()]
MIXES = {mix.name: mix for mix in _ALL}
"""By the names that a user may request instead of a scheme."""
_SHORT = {name: MIXES[f"{name}_m"] for name in _K}


def mix_named(scheme: object) -> Mix | None:
    """The mix of a name, in whatever case; ``q4_k`` is ``q4_k_m``, as for llama.cpp. None for anything else."""
    name = scheme.strip().lower() if isinstance(scheme, str) else ""
    return MIXES.get(name, _SHORT.get(name))
