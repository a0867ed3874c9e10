"""Find the memory of a model's own tensors, which belongs to no batch of samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator

from torch import Tensor, nn


class ModelStorages:
    """The storages of a model's own tensors: parameters, buffers and attributes.

    `collect` is called for each batch that leaves memory, and models have thousands of modules, so
    it visits only those that can have tensors in memory: the modules of loaded parts, and the few
    others that have buffers or attributes.
    """

    def __init__(
        self, model: nn.Module, part_of: Callable[[str], str | None], loaded: Collection[str]
    ) -> None:
        """
        Args:
            part_of: finds the part that a module is in, given its name; None for no part.
            loaded: the parts whose parameters are in memory, kept up to date by the caller.
        """
        self._loaded = loaded
        self._modules: dict[str | None, list[nn.Module]] = defaultdict(list)
        for name, module in model.named_modules():
            self._modules[part_of(name)].append(module)
        # By part: modules with buffers or attributes, as of when the part was not loaded. Code of
        # the model may have added some while it was.
        self._with_tensors: dict[str, list[nn.Module]] = {}
        for part in self._modules:
            if part is not None:
                self.leave_part(part)

    def leave_part(self, part: str) -> None:
        """Note which modules of a part keep tensors when its parameters are freed."""
        with_tensors: list[nn.Module] = []
        for module in self._modules[part]:
            if next(_iterate_kept_tensors(module), None) is not None:
                with_tensors.append(module)
        # Most parts have none, and are not visited.
        self._with_tensors.pop(part, None)
        if with_tensors:
            self._with_tensors[part] = with_tensors

    def collect(self) -> set[int]:
        """Collect the ids of the storages that the model has now."""
        storages = _collect_storages(self._modules[None])
        for part in self._loaded:
            storages |= _collect_storages(self._modules[part])
        for part, modules in self._with_tensors.items():
            if part not in self._loaded:
                storages |= _collect_storages(modules)
        return storages


def _collect_storages(modules: Iterable[nn.Module]) -> set[int]:
    storages: set[int] = set()
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                storages.add(parameter.untyped_storage()._cdata)
        for tensor in _iterate_kept_tensors(module):
            storages.add(tensor.untyped_storage()._cdata)
    return storages


def _iterate_kept_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors of a module that stay when its parameters are freed."""
    for values in (module._buffers.values(), vars(module).values()):
        for value in values:
            if isinstance(value, Tensor):
                yield value
