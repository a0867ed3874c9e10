"""Models that transformers runs: built without weights, which are read part by part; all samples pass in lockstep."""

from __future__ import annotations

from typing import Literal, get_args

Via = Literal["own", "transformers"]
"""What runs a model: our decoder, or transformers."""

VIAS = get_args(Via)
