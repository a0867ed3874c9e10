"""Code in a model's folder, which config.json's ``auto_map`` names: which file, whether it is
needed, and its classes.

Where transformers has a class for the model type, `AutoModelForCausalLM` uses that, unless the code
is trusted.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.base.foreign_errors import describe_foreign_error
from quantkit.base.json_values import format_value, read_json
from quantkit.base.messages import Message, Option
from quantkit.errors import CheckpointError, RequestError, UnsupportedError

TRUST = Message(Option("trust_remote_code", value=True))
_CONFIG = "AutoConfig"
_MODEL = "AutoModelForCausalLM"
_COPY = "copy all *.py files of the model's repository"
# Separates the name of another repository from the class in its code.
_ELSEWHERE = "--"


def code_file(raw: Mapping[str, Any]) -> str | None:
    """Find the file with the code of the model, or else of the config, that a config.json names;
    None if it names none.
    """
    references = _references(raw)
    reference = references.get(_MODEL, references.get(_CONFIG))
    if reference is None:
        return None
    return f"{reference.rpartition('.')[0]}.py"


def find_code_file(folder: Path) -> str | None:
    """Find the file as `code_file`, for a folder; None also if it has no config.json."""
    path = folder / "config.json"
    if path.is_file():
        raw = read_json(path)
    else:
        raw = None
    if isinstance(raw, dict):
        return code_file(raw)
    return None


def require_here(raw: Mapping[str, Any], folder: Path) -> None:
    """Refuse code that a config.json names and that is not in the model's folder.

    Raises:
        RequestError: if it is in another repository.
        CheckpointError: if the file is not there, or the name is none of a file and a class.
    """
    for reference in _references(raw).values():
        if _ELSEWHERE in reference:
            repository = reference.partition(_ELSEWHERE)[0] + _ELSEWHERE
            raise RequestError(
                "config.json names code of another repository, which is not fetched",
                path=folder,
                found=format_value(reference),
                hint=f"copy its *.py files here, and remove {format_value(repository)} from"
                " 'auto_map'",
            )
        module, _, name = reference.partition(".")
        # A module with a folder in its name could be a file outside of the model's folder.
        is_file_name = Path(module).name == module and module
        if not (is_file_name and name.isidentifier()):
            problem = "config.json names no class in a file of the folder"
            raise CheckpointError(
                problem, path=folder, found=format_value(reference), expected="modeling_x.Model"
            )
        if not (folder / f"{module}.py").is_file():
            raise CheckpointError(
                "a code file that config.json names is missing",
                path=folder / f"{module}.py",
                hint=_COPY,
            )


def needs_code(raw: Mapping[str, Any]) -> bool:
    """Check that a config.json names code for its model, and that the installed transformers has no
    class for it.
    """
    return _MODEL in _references(raw) and not _has_class(raw)


def takes_code(raw: Mapping[str, Any]) -> bool:
    """Check that `AutoModelForCausalLM` uses code that a config.json names if the code is trusted:
    it always does, except if the user has registered classes.
    """
    if not _references(raw):
        return False
    config = _find_config_class(raw)
    return config is None or config.__module__.startswith("transformers.")


def iter_architecture_classes(raw: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the classes of transformers that a config.json names in ``architectures``."""
    transformers: Any = importlib.import_module("transformers")
    names = raw.get("architectures")
    if not isinstance(names, list):
        return
    for name in names:
        cls = getattr(transformers, name, None) if isinstance(name, str) else None
        # Any attribute of the package can have the name.
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            yield cls


def load_code_classes(raw: Mapping[str, Any], folder: Path) -> tuple[Any, Any]:
    """Import the classes of a model and of its config, as `AutoModelForCausalLM` does for trusted
    code in a folder; this runs the code.

    Raises:
        RequestError, CheckpointError: as `require_here`; or if packages or files that the code
            imports are missing, or transformers' cache of modules cannot be written.
        UnsupportedError: if the code fails, or has no causal language model.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    require_here(raw, folder)
    references = _references(raw)
    kind = format_value(raw.get("model_type"))
    if _CONFIG in references:
        config = _import_class(references[_CONFIG], folder)
    else:
        config = _find_config_class(raw)
    if config is None:
        raise UnsupportedError(
            f"transformers does not know {kind}, and 'auto_map' has no '{_CONFIG}'", path=folder
        )
    if _MODEL in references:
        cls = _import_class(references[_MODEL], folder)
    else:
        cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(config, None)
    if not isinstance(cls, type):
        raise UnsupportedError(
            f"transformers has no class for {kind}, and 'auto_map' has no '{_MODEL}'", path=folder
        )
    return cls, config


def make_untrusted_error(raw: Mapping[str, Any], folder: Path) -> RequestError:
    """Make the error for code that is needed, and not trusted."""
    kind = format_value(raw.get("model_type"))
    return RequestError(
        f"transformers has no class for {kind}: the model needs the code in its folder, which is"
        " not run unless you trust it",
        path=folder,
        found=code_file(raw),
        hint=Message("read the code, then pass ", TRUST),
    )


def _references(raw: Mapping[str, Any]) -> dict[str, str]:
    """Read the classes of the config and the model that a config.json names, by the name of
    transformers' class for it.
    """
    auto_map = raw.get("auto_map")
    if not isinstance(auto_map, dict):
        return {}
    references: dict[str, str] = {}
    for key in (_CONFIG, _MODEL):
        reference = auto_map.get(key)
        if isinstance(reference, str):
            references[key] = reference
    return references


def _has_class(raw: Mapping[str, Any]) -> bool:
    """Check that transformers itself has a class for a model: by its type, or by a name in
    ``architectures``.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    config = _find_config_class(raw)
    if config is None:
        return False
    if config in MODEL_FOR_CAUSAL_LM_MAPPING:
        return True
    # The class of the body alone predicts no tokens.
    classes = iter_architecture_classes(raw)
    return any(cls is not MODEL_MAPPING.get(config, None) for cls in classes)


def _find_config_class(raw: Mapping[str, Any]) -> Any:
    """Find the class that transformers, or the user of its Python API, has for a config.json; None
    if there is none.
    """
    configurations: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in configurations.CONFIG_MAPPING:
        return configurations.CONFIG_MAPPING[kind]
    return None


def _import_class(reference: str, folder: Path) -> Any:
    """Import a class of the code in a folder as transformers does, from a copy in its cache of
    modules.
    """
    modules: Any = importlib.import_module("transformers.dynamic_module_utils")
    try:
        return modules.get_class_from_dynamic_module(reference, str(folder), local_files_only=True)
    except ImportError as error:
        problem = "the code in the folder cannot be imported"
        raise RequestError(problem, path=folder, found=" ".join(str(error).split())) from error
    # Any code can raise anything, or exit.
    except (Exception, SystemExit) as error:
        if isinstance(error, FileNotFoundError) and str(error.filename).endswith(".py"):
            raise CheckpointError(
                "a code file that another imports is missing", path=error.filename, hint=_COPY
            ) from error
        if isinstance(error, OSError) and _is_around(error.filename, modules.HF_MODULES_CACHE):
            raise RequestError(
                "transformers' cache of modules cannot be written",
                path=modules.HF_MODULES_CACHE,
                found=error.strerror,
                hint="set the environment variable HF_MODULES_CACHE to a writable folder",
            ) from error
        reason = describe_foreign_error(error)
        raise UnsupportedError(
            f"the code in the folder fails ({reason})", path=folder, found=reference
        ) from error


def _is_around(path: object, folder: str) -> bool:
    """Check that a path of an error is in a folder, or contains it."""
    # The error may be about a parent of the folder that cannot be made.
    error_path = Path(str(path))
    folder_path = Path(folder)
    return error_path.is_relative_to(folder_path) or folder_path.is_relative_to(error_path)
