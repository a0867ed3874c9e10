"""Grammars as text, in llguidance's variant of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

HEAD = '%llguidance {"no_forcing": true}\n'
"""Of each grammar: the model chooses among all tokens of what must follow."""

START = "start: answer\n"
"""Each grammar begins with the rule ``answer``."""

START_AFTER_REASONING = "start: BLANK answer\nBLANK: /[ \\t\\n]{0,4}/\n"
"""The same where a line break or two may come before the answer."""

_JSON_OPTIONS = {
    # Without a limit, some models write nothing but white space once they have begun.
    "whitespace_pattern": r" |\r?\n[ \t]{0,40}",
    # With other escapes, a key that an object already has could be spelled in another way.
    "json_allowed_escapes": 'nrbtf\\"',
}


def json_rule(schema: Mapping[str, Any]) -> str:
    """Write a checked schema as a rule of a grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Write a grammar of the JSON values that satisfy a checked schema."""
    return f"answer: {json_rule(schema)}\n"
