"""The decoder through torchax into XLA, for TPUs: split among devices, and run as two compiled
programs, one for a prompt and one for a chunk of new tokens. Only jobs import this package. Most of
it needs jax and torchax, which `quantkit[tpu]` installs; this file imports neither.
"""

from __future__ import annotations

from importlib import metadata

from quantkit.errors import RequestError

VERSIONS = {"jax": "0.10.2", "torchax": "0.0.13"}
"""The tested versions: torchax works with one jax and one torch only, and does not report
others.
"""

_HINT = 'pip install "quantkit[tpu]"'


def require_packages() -> None:
    """Refuse to go on without jax and torchax in the tested versions.

    Raises:
        RequestError: naming the package.
    """
    for name, version in VERSIONS.items():
        found = _find_version(name)
        if found is None:
            raise RequestError(f"{name} is not installed", hint=_HINT)
        if found != version:
            raise RequestError(
                f"this version of {name} does not serve", found=found, expected=version, hint=_HINT
            )


def require_compiler() -> None:
    """Refuse to go on without libtpu, the compiler for TPUs.

    Raises:
        RequestError: if it, or a package of `require_packages`, is missing.
    """
    require_packages()
    if _find_version("libtpu") is None:
        hint = f'pip install "jax[tpu]=={VERSIONS["jax"]}"; no TPU is needed'
        raise RequestError("libtpu is not installed", hint=hint)


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
