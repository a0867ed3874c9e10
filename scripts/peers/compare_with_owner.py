"""Hold what quantkit reads in a folder against what the format's owner makes of it, bit for bit.

    python scripts/peers/compare_with_owner.py FOLDER FLOATS.safetensors

FLOATS has the weights that the owner dequantizes, by their names in FOLDER, as the `peer_*.py`
scripts write them. Codes are multiplied by their scales in float32 and rounded to the owner's type;
what is read as floats is what the owner's rounds to. A weight that differs is printed; then a line
of JSON: how many weights were compared, how many are equal, the schemes, and as what the others are
stored. Exits 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

import torch
from safetensors.torch import load_file

from quantkit.formats.detect import open_checkpoint
from quantkit.tensors.qtensor import QuantTensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("floats")
    options = parser.parse_args()
    checkpoint, owner = open_checkpoint(options.folder), load_file(options.floats)
    kinds: Counter[str] = Counter()
    equal = 0
    for name, theirs in owner.items():
        spec, value = checkpoint.info(name), checkpoint.load(name)
        kinds[str(spec.scheme or spec.stored_as or spec.dtype)] += 1
        if isinstance(value, QuantTensor):
            ours = value.dequantize().to(theirs.dtype)
        else:
            ours, theirs = value, theirs.to(value.dtype)
        if torch.equal(ours, theirs):
            equal += 1
        else:
            gap = (ours.float() - theirs.float()).abs()
            print(
                f"{name}: {int((gap > 0).sum())} of {gap.numel()} differ, by {gap.max().item():.3g}"
                " at most"
            )
    for note in checkpoint.notes:
        print(note, file=sys.stderr)
    print(json.dumps({"compared": len(owner), "equal": equal, "kinds": kinds}))
    sys.exit(equal != len(owner))


if __name__ == "__main__":
    main()
