"""What GGUF says of a model: metadata and tensors from configs and back, and what llama.cpp would not compute."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_config import VARIANTS, _keys

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families import config_from_hf
from quantkit.architectures.gguf import ARCHITECTURES, ROPE_FREQS, gguf_tensors, keeps_float32, stored_offset
from quantkit.architectures.gguf_config import config_of, shortest
from quantkit.architectures.gguf_metadata import metadata_of, notes_of
from quantkit.architectures.gguf_rope import rope_tensors
from quantkit.architectures.topology import parameters
from quantkit.errors import CheckpointError, QuantkitError, UnsupportedError
