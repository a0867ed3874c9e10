"""A compiler for tests of when and where the CPU kernels are compiled, which takes many seconds
less each time.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from quantkit.kernels.build import ensure_compiled


def quick_compiler(name: str, path: Path, seconds: float = 0) -> Path:
    """A command that makes, of whatever it compiles, the kernels that the machine's own compiler
    has made for other tests. Each call adds its arguments as a line to a file next to it, with the
    ending ``.calls``.

    Args:
        name: of the kernels, as `compiled` takes it.
        path: of the command, which is returned.
        seconds: that it takes.
    """
    library = ensure_compiled(name)
    own = shlex.split(os.environ.get("CXX", "c++"))
    preprocessor = shlex.join([shutil.which(own[0]) or own[0], *own[1:]])
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f"""#!/bin/sh
PATH={shlex.quote(os.environ["PATH"])}
case " $* " in *" -E "*) exec {preprocessor} "$@";; esac
sleep {seconds}
echo "$*" >>{shlex.quote(f"{path}.calls")}
while [ "$#" -gt 1 ]; do [ "$1" = -o ] && cp {shlex.quote(str(library))} "$2"; shift; done
"""
    )
    path.chmod(0o755)
    return path
