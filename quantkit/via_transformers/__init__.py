"""Models that transformers runs: built without weights, which are read part by part; all samples
pass through them in lockstep.
"""

from __future__ import annotations

from typing import Literal, get_args

from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError

Via = Literal["own", "transformers"]
"""What runs a model: quantkit's decoder, or transformers."""

VIAS = get_args(Via)


def require_no_code(trust_remote_code: bool, found: str) -> None:
    """Raise a `RequestError` if code in a model's folder is trusted where none is run, because
    of what was found.
    """
    if trust_remote_code:
        problem = Message(
            Option("trust_remote_code", value=True), " requires a model that transformers runs"
        )
        raise RequestError(problem, found=found)
