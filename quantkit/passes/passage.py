"""Pass samples through a `PartwiseModel`: parts are loaded when the samples arrive at them, and
linears show their inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from quantkit.base.json_values import format_value
from quantkit.base.memory import malloc_trim
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, silent
from quantkit.errors import QuantkitError, UnsupportedError
from quantkit.passes.lockstep import Lockstep, NotLoaded, stop
from quantkit.passes.partwise_model import PartwiseModel
from quantkit.passes.site import WEIGHT, Brought, Site
from quantkit.passes.spill import Spill

Model = TypeVar("Model", bound=PartwiseModel, covariant=True)

_HIDDEN = "hidden states"


@dataclass(frozen=True)
class Part:
    """The place before a part that is not loaded."""

    name: str

    def __str__(self) -> str:
        return f"'{self.name}'"


@dataclass(frozen=True)
class Routed:
    """The place before experts, after their router has chosen."""

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
    """The order in which one batch reaches the products of a model.

    Attributes:
        groups: the sites in the order in which the batch reaches them; sites of a part with the
            same input form a group.
        repeated: the sites that it reaches several times.
        unreached: the sites that it does not reach.
    """

    groups: tuple[Inputs, ...]
    repeated: tuple[Site, ...]
    unreached: tuple[Site, ...]


def _ignore_product(site: Site, brought: Brought) -> None:
    """Do nothing."""


@contextmanager
def convert_model_errors(path: Path, describe_location: Callable[[], str] = str) -> Iterator[None]:
    """Convert errors of a model's code that runs on tokens to `UnsupportedError`, with the location
    that `describe_location` adds to the message.
    """
    try:
        yield
    except QuantkitError:
        raise
    except NotLoaded as error:
        raise UnsupportedError(
            f"{error}{describe_location()}, which is not supported", path=path
        ) from error
    # The code of a model can raise anything.
    except Exception as error:
        message = format_value(" ".join(str(error).split()))
        problem = f"the model's code fails{describe_location()} ({type(error).__name__}: {message})"
        hint = Message(
            "its input is text without images; ",
            Option("tensors_only", value=True, job="quantize"),
            " takes its tensors without running it",
        )
        raise UnsupportedError(problem, path=path, hint=hint) from error


class _Returned(tuple[Tensor, ...]):
    """An output of a model's body that has the states; all other fields are None."""

    def __new__(cls, states: Tensor) -> _Returned:
        return super().__new__(cls, (states,))

    def __getattr__(self, name: str) -> Tensor | None:
        if name == "last_hidden_state":
            return self[0]
        return None


class Observer:
    """Sees batches of samples on their way through a model. This one does nothing."""

    def resume(self, index: int) -> None:
        """Act before a batch, given by its index, continues."""

    def arrive(self, index: int, place: Hashable, value: Any) -> None:
        """Look at the value of a batch that has stopped at a place: a `Brought` at `Inputs`, and at
        `Routed` the number of tokens by expert.
        """

    def enter_part(self, part: str) -> None:
        """Act after the weights of a part have been loaded, before any batch uses them."""

    def leave_part(self, part: str) -> None:
        """Act when all batches have left a part, before its weights are freed."""


class _Collector(Observer):
    """Collects the values of all batches at one place."""

    def __init__(self, place: Hashable) -> None:
        self._place = place
        self.values: list[Any] = []

    def arrive(self, index: int, place: Hashable, value: Any) -> None:
        if place == self._place:
            self.values.append(value)


class Passage(Generic[Model]):
    """Batches of tokens [B, T] that pass through a model."""

    def __init__(self, partwise: Model, path: Path) -> None:
        """
        Args:
            path: of the model, for errors.
        """
        self.partwise = partwise
        self._path = path
        # How many modules of each part are running, over all batches.
        self._open: Counter[str] = Counter()
        # Of the batches that are on their way.
        self._lockstep: Lockstep | None = None
        # The module that was entered last, for errors.
        self._at = ""

    def survey(self, sites: Sequence[Site], tokens: Tensor) -> Survey:
        """Send a batch through the model, to see how it reaches the sites. Raises
        `UnsupportedError` if the model fails.
        """
        # The inputs, their version and the sites of each group. Inputs are kept, so that no other
        # tensor gets their identity.
        groups: list[tuple[Tensor, int, list[Site]]] = []
        counts: Counter[Site] = Counter()

        def record_site(site: Site, brought: Brought) -> None:
            counts[site] += 1
            inputs = brought.inputs
            part = self.partwise.part_of(site.module)
            for group_inputs, version, group_sites in reversed(groups):
                # The version tells whether the tensor was written to since.
                if group_inputs is not inputs or version != inputs._version:
                    continue
                # One part is loaded at a time, so a group must not span several.
                if self.partwise.part_of(group_sites[0].module) == part:
                    if site not in group_sites:
                        group_sites.append(site)
                    return
            groups.append((inputs, inputs._version, [site]))

        with self._hook_modules(sites, record_site):
            for _ in self._run_rounds([tokens], Spill()):
                pass
        repeated = tuple(site for site in sites if counts[site] > 1)
        unreached = tuple(site for site in sites if counts[site] == 0)
        inputs_in_order: list[Inputs] = []
        for _, _, group_sites in groups:
            sites_used_once = tuple(site for site in group_sites if counts[site] == 1)
            if sites_used_once:
                inputs_in_order.append(Inputs(sites_used_once))
        return Survey(tuple(inputs_in_order), repeated, unreached)

    def iterate_inputs(
        self,
        groups: Iterable[Inputs],
        batches: Sequence[Tensor],
        spill: Spill,
        observer: Observer,
    ) -> Generator[Inputs | Routed]:
        """Send batches through the model as far as they reach some groups of linears, in the order
        in which batches reach them, and yield each group after all batches have shown their inputs.
        The routing of experts is yielded before their groups.
        """
        # Batches stop only at the first site of a group, because the others have the same inputs.
        places = {group.sites[0]: group for group in groups}
        last = list(places.values())[-1]

        def stop_at_site(site: Site, brought: Brought) -> None:
            # The observer may want to see the inputs again, after it has looked at all of them.
            while stop(places[site], brought):
                pass

        def stop_at_experts(name: str, counts: list[int]) -> None:
            stop(Routed(name), counts)

        rounds = self._run_rounds(batches, spill, observer)
        with (
            self._hook_modules(list(places), stop_at_site, stop_at_experts),
            closing(rounds),
        ):
            for place in rounds:
                if isinstance(place, Routed):
                    yield place
                if isinstance(place, Inputs):
                    yield place
                    # The layers after the last site, such as the head, are not needed.
                    if place == last and not self._lockstep_repeats():
                        break

    def repeat_inputs(self) -> None:
        """Let all batches show the inputs again at the group that `iterate_inputs` has yielded."""
        assert self._lockstep is not None
        self._lockstep.repeats = True

    def _lockstep_repeats(self) -> bool:
        return self._lockstep is not None and self._lockstep.repeats

    def compute_hidden_states(
        self,
        batches: Sequence[Tensor],
        progress: Progress = silent,
        *,
        sites: Sequence[Site] = (),
        on_product: Callable[[Site, Brought], None] = _ignore_product,
    ) -> list[Tensor]:
        """Compute the states [B, T, D] of each batch, in float32, that the model without its head
        returns.

        Args:
            on_product: called with each of `sites` that a batch reaches, every time, and with its
                inputs. Batches continue to the head only if one of the sites is there.

        Raises:
            UnsupportedError: if the model fails.
        """
        body_modules = set(self.partwise.body.modules())
        site_modules = (self.partwise.model.get_submodule(site.module) for site in sites)
        to_head = any(module not in body_modules for module in site_modules)

        collector = _Collector(_HIDDEN)

        def stop_after_body(module: nn.Module, args: Any, output: Any) -> None:
            stop(_HIDDEN, output[0].cpu())

        handle = self.partwise.body.register_forward_hook(stop_after_body)
        listed = [part for part in self.partwise.parts if self.partwise.is_listed(part)]
        try:
            with (
                self._hook_modules(sites, on_product),
                closing(self._run_rounds(batches, Spill(), collector)) as rounds,
            ):
                for place in rounds:
                    if isinstance(place, Part) and place.name in listed:
                        progress("layers", listed.index(place.name), len(listed), "layers")
                    elif place == _HIDDEN and not to_head:
                        break
        finally:
            handle.remove()
        progress("layers", len(listed), len(listed), "layers")
        states: list[Tensor] = collector.values
        # A model may call parts of its body instead of the body.
        if len(states) != len(batches):
            raise UnsupportedError(
                "the model does not run its base model, as transformers names it",
                path=self._path,
                found=type(self.partwise.body).__name__,
            )
        return states

    def compute_logits(self, states: Tensor) -> Tensor:
        """Compute the logits [N, V] of states [N, D] that `compute_hidden_states` has returned: the
        model runs with these states in place of its body's output.
        """
        body = self.partwise.body
        if body is self.partwise.model:
            return states
        logits: list[Tensor] = []
        handle = self.partwise.model.register_forward_hook(
            lambda module, args, output: logits.append(output.logits[0].cpu())
        )
        # The model's own code may scale or cap logits, so it runs with a replaced body.
        body.forward = lambda *args, **kwargs: _Returned(
            states.unsqueeze(0).to(self.partwise.device)
        )
        tokens = torch.zeros(1, len(states), dtype=torch.long)
        try:
            with self._hook_modules((), _ignore_product):
                for _ in self._run_rounds([tokens], Spill()):
                    pass
        finally:
            del body.forward
            handle.remove()
        return logits[0]

    def _run_rounds(
        self,
        batches: Sequence[Tensor],
        spill: Spill,
        observer: Observer | None = None,
    ) -> Generator[Hashable]:
        """Run batches and yield the places where all of them have stopped. No other batches can run
        until the generator is closed.
        """
        if self.partwise.loaded:
            raise RuntimeError("this model is in use")
        if observer is None:
            observer = Observer()
        for part in {*self.partwise.resident_parts, *self.partwise.first_parts}:
            self.partwise.load(part)
            observer.enter_part(part)
        # Copies, because a stopped batch's tensors may lose their memory to files.
        forwards = [self._forward(self._copy(tokens)) for tokens in batches]
        try:
            self._lockstep = Lockstep(forwards, self.partwise.model, spill, self.partwise.silence)
            rounds = self._lockstep.iterate_rounds(observer.arrive, observer.resume)
            with closing(rounds):
                for place in rounds:
                    if isinstance(place, Part):
                        self._enter(place.name, observer)
                    yield place
        finally:
            for part in list(self.partwise.loaded):
                self.partwise.unload(part)
            self._open.clear()
            self._lockstep = None
            malloc_trim()

    def _copy(self, tokens: Tensor) -> Tensor:
        return tokens.to(self.partwise.device, copy=True)

    def _forward(self, tokens: Tensor) -> Callable[[], object]:
        def describe_location() -> str:
            return f" in '{self._at}'" if self._at else ""

        def run() -> None:
            with convert_model_errors(self._path, describe_location):
                self.partwise.model(input_ids=tokens, use_cache=False)

        return run

    def _enter(self, part: str, observer: Observer) -> None:
        """Load a part, and free those that no sample is in."""
        open_parts = {name for name, count in self._open.items() if count}
        for unused_part in self.partwise.loaded - self.partwise.resident_parts - open_parts:
            observer.leave_part(unused_part)
            self.partwise.unload(unused_part)
        # Freed memory is returned before the next weights are read.
        malloc_trim()
        self.partwise.load(part)
        observer.enter_part(part)

    @contextmanager
    def _hook_modules(
        self,
        sites: Iterable[Site],
        on_product: Callable[[Site, Brought], None],
        on_routing: Callable[[str, list[int]], None] = lambda name, counts: None,
    ) -> Iterator[None]:
        """Hook all modules, so that they load their parts, and products show their inputs."""
        handles: list[Any] = []
        names: dict[nn.Module, str] = {}
        parts: dict[nn.Module, str | None] = {}
        for name, module in self.partwise.model.named_modules():
            names[module] = name
            parts[module] = self.partwise.part_of(name)
        site_at: dict[tuple[str, str, int | None], Site] = {}
        experts: set[str] = set()
        for site in sites:
            site_at[site.module, site.leaf, site.expert] = site
            if site.expert is not None:
                experts.add(site.module)

        def enter_module(
            module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
        ) -> None:
            self._at = names[module]
            part = parts[module]
            if part is not None:
                # The caller loads the part when all batches have stopped here.
                if part not in self.partwise.loaded:
                    stop(Part(part))
                # Counted per module, because the modules of a part are called within each other.
                self._open[part] += 1
            site = site_at.get((names[module], WEIGHT, None))
            if site is not None:
                inputs = args[0] if args else next(iter(kwargs.values()))
                on_product(site, Brought(inputs))

        def leave_module(module: nn.Module, args: Any, output: Any) -> None:
            part = parts[module]
            if part is not None:
                self._open[part] -= 1

        passage = self

        class OfExperts:
            def visit_routing(self, module: nn.Module, counts: list[int]) -> None:
                if names[module] in experts:
                    on_routing(names[module], counts)

            def visit_product(
                self, module: nn.Module, leaf: str, expert: int, brought: Brought
            ) -> None:
                owner = f"{names[module]}.{leaf}".rpartition(".")[0]
                part = passage.partwise.part_of(owner)
                # An expert may be a part of its own, which no module has entered yet.
                if part is not None and part not in passage.partwise.loaded:
                    stop(Part(part))
                site = site_at.get((names[module], leaf, expert))
                if site is not None:
                    on_product(site, brought)

        for module in names:
            handles.append(module.register_forward_pre_hook(enter_module, with_kwargs=True))
            handles.append(module.register_forward_hook(leave_module))
        self.partwise.set_visitor(OfExperts())
        try:
            yield
        finally:
            self.partwise.set_visitor(None)
            for handle in handles:
                handle.remove()
