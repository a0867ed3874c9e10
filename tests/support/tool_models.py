"""A tiny random model with the tokens of several families, and chat templates in the ways in
which these call tools.
"""

from __future__ import annotations

import json
from pathlib import Path

TOKENS = {
    "[TOOL_CALLS]": True,
    "[ARGS]": True,
    "<|python_tag|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<think>": False,
    "</think>": True,
}
"""Each with whether it is special."""

_HEAD = (
    "{% for one in messages %}{{ one.role }}: {{ one.reasoning_content or '' }}{{ one.content or"
    " '' }}"
)
_TAIL = "\n{% endfor %}{% if tools %}%s{% endif %}assistant:"

TEMPLATES = {
    "hermes": (
        _HEAD
        + "{% for call in one.tool_calls or [] %}<tool_call>\n"
        + '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments |'
        " tojson }}}"
        + "\n</tool_call>{% endfor %}"
        + _TAIL.replace("%s", "Tools: {{ tools | tojson }}")
    ),
    "llama3": (
        _HEAD
        + "{% for call in one.tool_calls or [] %}"
        + '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson'
        " }}}{% endfor %}" + _TAIL.replace("%s", "{{ tools | tojson }}")
    ),
    "mistral": (
        _HEAD
        + "{% if one.tool_calls %}[TOOL_CALLS] [{% for call in one.tool_calls %}"
        + '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments |'
        " tojson }}}"
        + "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}"
        + _TAIL.replace("%s", "[TOOLS]{{ tools | tojson }}")
    ),
    "mistral_args": (
        _HEAD
        + "{% for call in one.tool_calls or [] %}"
        + "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{%"
        " endfor %}" + _TAIL.replace("%s", "[TOOLS]{{ tools | tojson }}")
    ),
    "plain": _HEAD + _TAIL.replace("{% if tools %}%s{% endif %}", ""),
    "unknown": _HEAD + _TAIL.replace("%s", "{{ tools | tojson }}"),
    "opened": _HEAD + _TAIL.replace("{% if tools %}%s{% endif %}", "") + " <think>\n",
    "closed": _HEAD + _TAIL.replace("{% if tools %}%s{% endif %}", "") + " <think>\n\n</think>\n\n",
}


def write_tool_model(folder: Path) -> Path:
    """A folder with a random Llama over bytes."""
    import oracle
    from vocabularies import write_byte_level

    bytes_alone = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    write_byte_level(folder, bytes_alone, more=TOKENS)
    added = {
        one["content"]: one["id"]
        for one in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    }
    sizes = {
        "vocab_size": max(added.values()) + 6,
        "max_position_embeddings": 2048,
    }  # some rows are of no token
    ends = {"bos_token_id": added["<s>"], "eos_token_id": added["<|im_end|>"]}
    oracle.save(oracle.make("llama", **sizes, **ends), folder)
    return folder
