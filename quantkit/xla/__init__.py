"""Run the decoder on TPUs through torchax and XLA: sharded over devices, and compiled to two
programs, one for prompts and one for a chunk of new tokens. Only jobs import this package. Most of
it needs jax and torchax, which `quantkit[tpu]` installs; this file imports neither.
"""

from __future__ import annotations

from importlib import metadata

from quantkit.errors import RequestError

VERSIONS = {"jax": "0.10.2", "torchax": "0.0.13"}
"""The tested versions. Each torchax works with only one version of jax and of torch, and does not
report other versions.
"""

_HINT = 'pip install "quantkit[tpu]"'


def require_packages() -> None:
    """Require jax and torchax in the tested versions.

    Raises:
        RequestError: naming the package.
    """
    for name, version in VERSIONS.items():
        installed = _find_version(name)
        if installed is None:
            raise RequestError(f"{name} is not installed", hint=_HINT)
        if installed != version:
            raise RequestError(
                f"this version of {name} is not supported",
                found=installed,
                expected=version,
                hint=_HINT,
            )


def require_compiler() -> None:
    """Require libtpu, the compiler for TPUs.

    Raises:
        RequestError: if it, or a package of `require_packages`, is missing.
    """
    require_packages()
    if _find_version("libtpu") is None:
        hint = f'pip install "jax[tpu]=={VERSIONS["jax"]}"; no TPU is needed'
        raise RequestError("libtpu is not installed", hint=hint)


def _find_version(name: str) -> str | None:
    # From the metadata, because importing torchax changes torch for the whole process.
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
