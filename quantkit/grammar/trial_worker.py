"""The program that `trial` starts: it compiles grammars for a vocabulary of bytes, and writes a
line after each.

Requests are lines of JSON on stdin. It imports nothing of quantkit.
"""

from __future__ import annotations

import contextlib
import json
import sys

# The folder of llguidance: the program runs without site-packages, so that it starts sooner.
sys.path += sys.argv[2:]

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper


class Bytes:
    """A vocabulary of bytes, and a token for the end."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main() -> None:
    # Windows has no such limit.
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), slices=[])
    for line in sys.stdin:
        grammar, limits = json.loads(line)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits))
        # The first mask can take as long as the compilation. Errors are for the caller, who
        # compiles the grammar again.
        if not matcher.is_error():
            matcher.compute_bitmask()
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
