"""Samples on their way through a `LazyModel`: parts get their weights when the samples come to
them, and linears show their inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.base.json_values import format_value
from quantkit.base.memory import malloc_trim
from quantkit.base.progress import Progress, silent
from quantkit.errors import QuantkitError, UnsupportedError
from quantkit.via_transformers.experts import Brought, set_visitor
from quantkit.via_transformers.lazy_model import LazyModel
from quantkit.via_transformers.lockstep import Lockstep, NotLoaded, stop
from quantkit.via_transformers.sites import WEIGHT, Site
from quantkit.via_transformers.spill import Spill

_HIDDEN = "hidden states"
# What else is outside of lists is small, and always there.
_LARGE_TYPES = (nn.Embedding, nn.Linear)
# Numbers; models may use the weight of such a module without calling it.
_SMALL = 1 << 16


def _is_large(module: nn.Module) -> bool:
    return (
        isinstance(module, _LARGE_TYPES)
        and sum(parameter.numel() for parameter in module.parameters()) > _SMALL
    )


@dataclass(frozen=True)
class Part:
    """The place before a part whose weights are not there."""

    name: str

    def __str__(self) -> str:
        return f"'{self.name}'"


@dataclass(frozen=True)
class Routed:
    """The place before experts, when their router has chosen."""

    module: str

    def __str__(self) -> str:
        return f"'{self.module}'"


@dataclass(frozen=True)
class Inputs:
    """The place before the first of some products that have the same input."""

    sites: tuple[Site, ...]

    def __str__(self) -> str:
        return f"'{self.sites[0].parameter}'"


@dataclass(frozen=True)
class Survey:
    """What one batch shows about the products of a model.

    Attributes:
        groups: the sites in the order in which the batch reaches them; those of a part with the
            same input together.
        repeated: those that it reaches several times.
        unreached: those that it does not reach.
    """

    groups: tuple[Inputs, ...]
    repeated: tuple[Site, ...]
    unreached: tuple[Site, ...]


def _ignore_product(site: Site, brought: Brought) -> None:
    """Sees no product."""


@contextmanager
def convert_model_errors(path: Path, describe_location: Callable[[], str] = str) -> Iterator[None]:
    """The context in which the code of a model at a path runs on tokens. Raises `UnsupportedError`
    if it fails, with what `where` adds to the message.
    """
    try:
        yield
    except QuantkitError:
        raise
    except NotLoaded as error:
        raise UnsupportedError(
            f"{error}{describe_location()}, which is not supported", path=path
        ) from error
    except Exception as error:  # of the code of any model
        message = format_value(" ".join(str(error).split()))
        problem = f"the model's code fails{describe_location()} ({type(error).__name__}: {message})"
        hint = (
            "it is given text alone, no image; `tensors_only=True` of quantize takes its tensors"
            " without running it"
        )
        raise UnsupportedError(problem, path=path, hint=hint) from error


class _Returned(tuple[Tensor, ...]):
    """What the body of a model returns: the states, and nothing else that may be requested."""

    def __new__(cls, states: Tensor) -> _Returned:
        return super().__new__(cls, (states,))

    def __getattr__(self, name: str) -> Tensor | None:
        if name == "last_hidden_state":
            return self[0]
        return None


class Passage:
    """Batches of tokens [B, T] that pass through a model."""

    def __init__(self, lazy: LazyModel, path: Path) -> None:
        """
        Args:
            path: of the model, for errors.
        """
        self.lazy = lazy
        self._path = path
        self._open: Counter[str] = Counter()
        # The module that was entered last.
        self._at = ""
        modules = {}
        for part in lazy.parts:
            if not lazy.is_listed(part):
                modules[part] = lazy.model.get_submodule(part)
        self._resident = {part for part, module in modules.items() if not _is_large(module)}

    def survey(self, sites: Sequence[Site], tokens: Tensor) -> Survey:
        """Send a batch through the model, to see how it reaches the sites. Raises
        `UnsupportedError` if the model fails.
        """
        # A tensor that is kept has an identity that no other gets.
        groups: list[tuple[Tensor, int, list[Site]]] = []
        counts: Counter[Site] = Counter()

        def record_site(site: Site, brought: Brought) -> None:
            counts[site] += 1
            inputs = brought.inputs
            part = self.lazy.part_of(site.module)
            same = (
                group
                for group in reversed(groups)
                if group[0] is inputs
                and group[1] == inputs._version
                and self.lazy.part_of(group[2][0].module) == part
            )
            if (found := next(same, None)) is None:
                groups.append((inputs, inputs._version, [site]))
            elif site not in found[2]:
                found[2].append(site)

        with self._hook_modules(sites, record_site):
            for _ in self._run_rounds([tokens], Spill()):
                pass
        repeated = tuple(site for site in sites if counts[site] > 1)
        once = (tuple(one for one in own if one not in repeated) for _, _, own in groups)
        unreached = tuple(site for site in sites if not counts[site])
        return Survey(tuple(Inputs(own) for own in once if own), repeated, unreached)

    def iterate_inputs(
        self,
        groups: Iterable[Inputs],
        batches: Sequence[Tensor],
        spill: Spill,
        on_stop: Callable[[int, Hashable, Any], None],
        on_resume: Callable[[int], None],
        on_part_exit: Callable[[str], None] = lambda part: None,
    ) -> Generator[Inputs]:
        """Send batches through the model as far as they reach groups of a `Survey`, in its order:
        each when what all batches bring has been shown.

        Args:
            arrived: called with the index of a batch and what it brings: a `Brought` to `Inputs`,
                and to `Routed` the number of tokens by expert.
            before: called with the index of a batch before it goes on.
            left: called with a part that all batches have left, before its weights are freed.
        """
        places = {group.sites[0]: group for group in groups}
        last = list(places.values())[-1]

        def stop_at_site(site: Site, brought: Brought) -> None:
            stop(places[site], brought)

        rounds = self._run_rounds(batches, spill, on_stop, on_resume, on_part_exit)
        with (
            self._hook_modules(
                list(places), stop_at_site, lambda name, counts: stop(Routed(name), counts)
            ),
            closing(rounds),
        ):
            for place in rounds:
                if isinstance(place, Inputs):
                    yield place
                    if place == last:
                        # The head is not needed.
                        break

    def compute_hidden_states(
        self,
        batches: Sequence[Tensor],
        progress: Progress = silent,
        *,
        sites: Sequence[Site] = (),
        on_product: Callable[[Site, Brought], None] = _ignore_product,
    ) -> list[Tensor]:
        """Return the states [B, T, D] of each batch, in float32, that the model without its head
        returns.

        Args:
            reached: called with each of `sites` that a batch reaches, every time, and with what it
                brings. Batches go on to the head only if one of the sites is there.

        Raises:
            UnsupportedError: if the model fails.
        """
        result: list[Tensor] = []
        body = set(self.lazy.body.modules())
        to_head = any(self.lazy.model.get_submodule(site.module) not in body for site in sites)

        def collect_states(index: int, place: Hashable, value: Any) -> None:
            if place == _HIDDEN:
                result.append(value)

        handle = self.lazy.body.register_forward_hook(
            lambda module, args, output: stop(_HIDDEN, output[0])
        )
        listed = [part for part in self.lazy.parts if self.lazy.is_listed(part)]
        try:
            with (
                self._hook_modules(sites, on_product),
                closing(self._run_rounds(batches, Spill(), collect_states)) as rounds,
            ):
                for place in rounds:
                    if isinstance(place, Part) and place.name in listed:
                        progress("layers", listed.index(place.name), len(listed), "layers")
                    elif place == _HIDDEN and not to_head:
                        break
        finally:
            handle.remove()
        progress("layers", len(listed), len(listed), "layers")
        if len(result) != len(batches):
            raise UnsupportedError(
                "the model does not run the module that transformers calls its body",
                path=self._path,
                found=type(self.lazy.body).__name__,
            )
        return result

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return the logits [N, V] of states [N, D] that `hidden` has returned: the model runs with
        these in place of what its body computes.
        """
        body = self.lazy.body
        if body is self.lazy.model:
            return states
        found: list[Tensor] = []
        handle = self.lazy.model.register_forward_hook(
            lambda module, args, output: found.append(output.logits[0])
        )
        body.forward = lambda *args, **kwargs: _Returned(states.unsqueeze(0))
        try:
            with self._hook_modules((), _ignore_product):
                for _ in self._run_rounds([torch.zeros(1, len(states), dtype=torch.long)], Spill()):
                    pass
        finally:
            del body.forward
            handle.remove()
        return found[0]

    def _run_rounds(
        self,
        batches: Sequence[Tensor],
        spill: Spill,
        on_stop: Callable[[int, Hashable, Any], None] = lambda index, place, value: None,
        on_resume: Callable[[int], None] = lambda index: None,
        on_part_exit: Callable[[str], None] = lambda part: None,
    ) -> Generator[Hashable]:
        """Yield the places where all batches have stopped; until the generator is closed no others
        pass.
        """
        if self.lazy.loaded:
            raise RuntimeError("this model is in use")
        for part in {*self._resident, *self.lazy.first_parts}:
            self.lazy.load(part)
        forwards = [self._forward(tokens.clone()) for tokens in batches]
        try:
            rounds = Lockstep(forwards, self.lazy.model, spill).iterate_rounds(on_stop, on_resume)
            with closing(rounds):
                for place in rounds:
                    if isinstance(place, Part):
                        self._enter(place.name, on_part_exit)
                    yield place
        finally:
            for part in list(self.lazy.loaded):
                self.lazy.unload(part)
            self._open.clear()
            malloc_trim()

    def _forward(self, tokens: Tensor) -> Callable[[], object]:
        def run() -> None:
            with convert_model_errors(self._path, lambda: f" in '{self._at}'" if self._at else ""):
                self.lazy.model(input_ids=tokens, use_cache=False)

        return run

    def _enter(self, part: str, on_part_exit: Callable[[str], None]) -> None:
        """Load a part, and free those that no sample is in."""
        for one in (
            self.lazy.loaded
            - self._resident
            - {name for name, count in self._open.items() if count}
        ):
            on_part_exit(one)
            self.lazy.unload(one)
        malloc_trim()
        self.lazy.load(part)

    @contextmanager
    def _hook_modules(
        self,
        sites: Iterable[Site],
        on_product: Callable[[Site, Brought], None],
        on_routing: Callable[[str, list[int]], None] = lambda name, counts: None,
    ) -> Iterator[None]:
        """The context in which modules load their parts, and products show their inputs."""
        handles: list[Any] = []
        names = {module: name for name, module in self.lazy.model.named_modules()}
        parts = {module: self.lazy.part_of(name) for module, name in names.items()}
        wanted = {(site.module, site.leaf, site.expert): site for site in sites}
        experts = {site.module for site in sites if site.expert is not None}

        def enter_module(
            module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
        ) -> None:
            self._at = names[module]
            part = parts[module]
            if part is not None:
                if part not in self.lazy.loaded:
                    stop(Part(part))
                self._open[part] += 1
            if (site := wanted.get((names[module], WEIGHT, None))) is not None:
                on_product(site, Brought(args[0] if args else next(iter(kwargs.values()))))

        def leave_module(module: nn.Module, args: Any, output: Any) -> None:
            if (part := parts[module]) is not None:
                self._open[part] -= 1

        class OfExperts:
            def visit_routing(self, module: nn.Module, counts: list[int]) -> None:
                if names[module] in experts:
                    on_routing(names[module], counts)

            def visit_product(
                self, module: nn.Module, leaf: str, expert: int, brought: Brought
            ) -> None:
                if (site := wanted.get((names[module], leaf, expert))) is not None:
                    on_product(site, brought)

        for module in names:
            handles.append(module.register_forward_pre_hook(enter_module, with_kwargs=True))
            handles.append(module.register_forward_hook(leave_module))
        set_visitor(self.lazy.model, OfExperts())
        try:
            yield
        finally:
            set_visitor(self.lazy.model, None)
            for handle in handles:
                handle.remove()
