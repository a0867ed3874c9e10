"""Pass samples through a `PartwiseModel`: parts are loaded when the samples arrive at them, and
linears show their inputs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from quantkit.base.foreign_errors import describe_foreign_error
from quantkit.base.memory import malloc_trim
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, silent
from quantkit.distributed.group import lost_as_error
from quantkit.errors import QuantkitError, UnsupportedError
from quantkit.passes.activation_store import ActivationStore
from quantkit.passes.lockstep import Lockstep, NotLoaded, stop
from quantkit.passes.model_storages import ModelStorages
from quantkit.passes.partwise_model import PartwiseModel
from quantkit.passes.site import WEIGHT, Brought, Site

Model = TypeVar("Model", bound=PartwiseModel, covariant=True)

HIDDEN = "hidden states"


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
    """The place before the first of some products that have the same input.

    Attributes:
        sites: the products.
        is_repeated: whether a batch comes here several times.
    """

    sites: tuple[Site, ...]
    is_repeated: bool = False

    def __str__(self) -> str:
        return f"'{self.sites[0].parameter}'"


@dataclass(frozen=True)
class Survey:
    """The order in which one batch reaches the products of a model.

    Attributes:
        groups: the sites in the order in which the batch reaches them first; sites of a part with
            the same input form a group.
        repeated: the sites of experts that it reaches several times, which are in no group.
        unreached: the sites that it does not reach.
    """

    groups: tuple[Inputs, ...]
    repeated: tuple[Site, ...]
    unreached: tuple[Site, ...]


def _list_groups(
    occurrences: Sequence[tuple[Site, ...]], counts: Mapping[Site, int]
) -> list[Inputs]:
    """List groups in the order in which a batch reaches them first.

    Args:
        occurrences: the sites with the same input, each time that the batch reaches them.
        counts: how often it reaches each site.
    """
    # The sites with which a repeated site shares its input.
    companions: dict[Site, set[tuple[Site, ...]]] = defaultdict(set)
    for sites in occurrences:
        repeated = _select_repeated(sites, counts)
        for site in repeated:
            companions[site].add(repeated)
    # A dictionary, because a repeated group occurs several times.
    groups: dict[Inputs, None] = {}
    for sites in occurrences:
        sites_used_once = tuple(site for site in sites if counts[site] == 1)
        if sites_used_once:
            groups[Inputs(sites_used_once)] = None
        repeated = _select_repeated(sites, counts)
        if not repeated:
            continue
        if all(len(companions[site]) == 1 for site in repeated):
            groups[Inputs(repeated, is_repeated=True)] = None
            continue
        # At another use they have different inputs.
        for site in repeated:
            groups[Inputs((site,), is_repeated=True)] = None
    return list(groups)


def _select_repeated(sites: Iterable[Site], counts: Mapping[Site, int]) -> tuple[Site, ...]:
    """Select the sites, not of experts, that a batch reaches several times."""
    return tuple(site for site in sites if counts[site] > 1 and site.expert is None)


def _ignore_product(site: Site, brought: Brought) -> None:
    """Do nothing."""


@contextmanager
def convert_model_errors(path: Path, describe_location: Callable[[], str] = str) -> Iterator[None]:
    """Convert errors of a model's code that runs on tokens to `UnsupportedError`, with the location
    that `describe_location` adds to the message.
    """
    try:
        # Other processes may share the model.
        with lost_as_error():
            yield
    except QuantkitError:
        raise
    except NotLoaded as error:
        raise UnsupportedError(
            f"{error}{describe_location()}, which is not supported", path=path
        ) from error
    # The code of a model can raise anything.
    except Exception as error:
        reason = describe_foreign_error(error)
        problem = f"the model's code fails{describe_location()} ({reason})"
        hint = Message(
            "its input is text without images; ",
            Option("tensors_only", value=True, job="quantize"),
            " takes its tensors without running it",
        )
        raise UnsupportedError(problem, path=path, hint=hint) from error


@contextmanager
def _removing(handle: Any) -> Iterator[None]:
    """Remove a hook at the end of the context."""
    try:
        yield
    finally:
        handle.remove()


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

    def runs_ahead(self, index: int, place: Hashable) -> bool:
        """Decide whether a batch that has shown its inputs at a place goes on to the next one
        before the others; then it cannot show them again.
        """
        return False

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

    def __init__(self, partwise: Model, path: Path, *, returns_memory: bool = True) -> None:
        """
        Args:
            path: of the model, for errors.
            returns_memory: whether the memory of each part is returned to the system when it is
                freed. Where passes follow each other quickly, the next one would have to take it
                again.
        """
        self.partwise = partwise
        self.path = path
        self._returns_memory = returns_memory
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
            for _ in self._run_rounds([tokens], ActivationStore()):
                pass
        unreached = tuple(site for site in sites if counts[site] == 0)
        # Each use of an expert has other tokens.
        repeated = tuple(site for site in sites if counts[site] > 1 and site.expert is not None)
        occurrences = [tuple(group_sites) for _, _, group_sites in groups]
        return Survey(tuple(_list_groups(occurrences, counts)), repeated, unreached)

    def iterate_inputs(
        self,
        groups: Iterable[Inputs],
        batches: Sequence[Tensor],
        store: ActivationStore,
        observer: Observer,
        *,
        to_end: bool = False,
    ) -> Generator[Inputs | Routed]:
        """Send batches through the model as far as they reach some groups of linears, in the order
        in which batches reach them, and yield each group after all batches have shown their inputs.
        The routing of experts is yielded before their groups. With `to_end`, batches go on to the
        end of the model without its head after the last group.
        """
        # Batches stop only at the first site of a group, because the others have the same inputs.
        places = {group.sites[0]: group for group in groups}
        last: Inputs | None = None
        last_is_in_body = True
        if places:
            last = list(places.values())[-1]
            owner = self.partwise.model.get_submodule(last.sites[0].module)
            last_is_in_body = any(owner is module for module in self.partwise.body.modules())

        def stop_at_site(site: Site, brought: Brought) -> None:
            # The observer may want to see the inputs again, after it has looked at all of them.
            while stop(places[site], brought):
                pass

        def stop_at_experts(name: str, counts: list[int]) -> None:
            stop(Routed(name), counts)

        def stop_after_body(module: nn.Module, args: Any, output: Any) -> None:
            stop(HIDDEN)

        rounds = self._run_rounds(batches, store, observer)
        with (
            self._hook_modules(list(places), stop_at_site, stop_at_experts, stops_at_sites=True),
            _removing(self.partwise.body.register_forward_hook(stop_after_body)),
            closing(rounds),
        ):
            for place in rounds:
                if isinstance(place, Routed):
                    yield place
                if isinstance(place, Inputs):
                    yield place
                    # The layers after the last site, such as the head, are not needed.
                    if place == last and not to_end and not self._lockstep_repeats():
                        break
                # The head's own sites follow the body.
                if place == HIDDEN and to_end and last_is_in_body:
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

        collector = _Collector(HIDDEN)

        def stop_after_body(module: nn.Module, args: Any, output: Any) -> None:
            stop(HIDDEN, output[0].cpu())

        handle = self.partwise.body.register_forward_hook(stop_after_body)
        listed = [part for part in self.partwise.parts if self.partwise.is_listed(part)]
        try:
            with (
                self._hook_modules(sites, on_product),
                closing(self._run_rounds(batches, ActivationStore(), collector)) as rounds,
            ):
                for place in rounds:
                    if isinstance(place, Part) and place.name in listed:
                        progress("layers", listed.index(place.name), len(listed), "layers")
                    elif place == HIDDEN and not to_head:
                        break
        finally:
            handle.remove()
        progress("layers", len(listed), len(listed), "layers")
        states: list[Tensor] = collector.values
        self.require_body(len(states), batches)
        return states

    def compute_logits(self, states: Tensor) -> Tensor:
        """Compute the logits [N, V] of states [N, D] that `compute_hidden_states` has returned."""
        with torch.no_grad(), self.open_head() as compute:
            return compute(states).cpu()

    @contextmanager
    def open_head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Load the model's head, and yield a function that computes the logits [N, V] of states [N,
        D] that `compute_hidden_states` has returned: the model runs with these states in place of
        its body's output, under autograd if that is on. Nothing else can run meanwhile.

        The function raises `UnsupportedError` if the model fails.
        """
        separate_head = self.partwise.open_head()
        if separate_head is not None:
            with separate_head as compute_logits:
                yield compute_logits
            return
        body = self.partwise.body
        if body is self.partwise.model:
            yield lambda states: states
            return
        hidden: list[Tensor] = []
        logits: list[Tensor] = []

        def compute(states: Tensor) -> Tensor:
            hidden.append(states.unsqueeze(0).to(self.partwise.device))
            tokens = torch.zeros(1, len(states), dtype=torch.long, device=self.partwise.device)
            with self.partwise.silence():
                self._forward(tokens)()
            hidden.clear()
            return logits.pop()

        handle = self.partwise.model.register_forward_hook(
            lambda module, args, output: logits.append(output.logits[0])
        )
        # The model's own code may scale or cap logits, so it runs with a replaced body.
        body.forward = lambda *args, **kwargs: _Returned(hidden[0])
        try:
            with self.load_when_entered(self._find_first_parts()):
                yield compute
        finally:
            del body.forward
            handle.remove()

    @contextmanager
    def load_when_entered(self, parts: Collection[str]) -> Iterator[None]:
        """Load parts, and others when the model's code enters them; all are freed at the end."""
        handles: list[Any] = []

        def make_hook(name: str, part: str) -> Callable[..., None]:
            def enter_module(module: nn.Module, args: Any) -> None:
                self._at = name
                if part not in self.partwise.loaded:
                    self.partwise.load(part)

            return enter_module

        self._load_first(parts)
        try:
            for name, module in self.partwise.model.named_modules():
                part = self.partwise.part_of(name)
                if part is not None:
                    handles.append(module.register_forward_pre_hook(make_hook(name, part)))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._unload_all()

    def iterate_places(
        self,
        batches: Sequence[Tensor],
        observer: Observer,
        context: Callable[[], AbstractContextManager[object]],
    ) -> Generator[Hashable]:
        """Send batches through the model, and yield the places where all of them have stopped:
        `Part`, and those where code that runs within the model stops them.

        Args:
            context: makes a context in which the model's code runs.
        """
        rounds = self._run_rounds(batches, ActivationStore(), observer, context)
        with self._hook_modules((), _ignore_product), closing(rounds):
            yield from rounds

    def require_body(self, count: int, batches: Sequence[Tensor]) -> None:
        """Raise `UnsupportedError` unless the body has returned states for all batches."""
        # A model may call parts of its body instead of the body.
        if count != len(batches):
            raise UnsupportedError(
                "the model does not run its base model, as transformers names it",
                path=self.path,
                found=type(self.partwise.body).__name__,
            )

    def _run_rounds(
        self,
        batches: Sequence[Tensor],
        store: ActivationStore,
        observer: Observer | None = None,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Generator[Hashable]:
        """Run batches and yield the places where all of them have stopped. No other batches can run
        until the generator is closed.
        """
        if observer is None:
            observer = Observer()
        first_parts = self._find_first_parts()
        self._load_first(first_parts)
        for part in first_parts:
            observer.enter_part(part)
        # Copies, because a stopped batch's tensors may lose their memory to files.
        forwards = [self._forward(self._copy(tokens)) for tokens in batches]
        partwise = self.partwise
        storages = ModelStorages(partwise.model, partwise.part_of, partwise.loaded)

        @contextmanager
        def enter_contexts() -> Iterator[None]:
            with self.partwise.silence(), context():
                yield

        def arrive(index: int, place: Hashable, value: Any) -> None:
            if isinstance(place, Inputs):
                load_expert(place)
            observer.arrive(index, place, value)

        def load_expert(group: Inputs) -> None:
            """Load the part of an expert when the first batch shows inputs of it."""
            part = partwise.part_of(group.sites[0].owner)
            if part is not None and part not in partwise.loaded:
                # Other batches may still be in the expert before it, which stays until they are
                # here. One expert is small; another stop would move all batches once more.
                partwise.load(part)
                observer.enter_part(part)
                experts_loaded.add(part)

        experts_loaded: set[str] = set()
        try:
            self._lockstep = Lockstep(forwards, storages.collect, store, enter_contexts)
            rounds = self._lockstep.iterate_rounds(arrive, observer.resume, observer.runs_ahead)
            with closing(rounds):
                for place in rounds:
                    if isinstance(place, Part):
                        self._leave_unused(observer, storages)
                        partwise.load(place.name)
                        observer.enter_part(place.name)
                    elif experts_loaded:
                        self._leave_unused(observer, storages, needed=experts_loaded)
                        experts_loaded.clear()
                    yield place
        finally:
            self._unload_all()

    def _find_first_parts(self) -> set[str]:
        return {*self.partwise.resident_parts, *self.partwise.first_parts}

    def _load_first(self, parts: Collection[str]) -> None:
        if self.partwise.loaded:
            raise RuntimeError("this model is in use")
        for part in parts:
            self.partwise.load(part)

    def _unload_all(self) -> None:
        for part in list(self.partwise.loaded):
            self.partwise.unload(part)
        self._open.clear()
        self._lockstep = None
        self._return_memory()

    def _copy(self, tokens: Tensor) -> Tensor:
        return tokens.to(self.partwise.device, copy=True)

    def _forward(self, tokens: Tensor) -> Callable[[], object]:
        def describe_location() -> str:
            return f" in '{self._at}'" if self._at else ""

        def run() -> None:
            with convert_model_errors(self.path, describe_location):
                self.partwise.model(input_ids=tokens, use_cache=False)

        return run

    def _leave_unused(
        self, observer: Observer, storages: ModelStorages, needed: Collection[str] = ()
    ) -> None:
        """Free the parts that no sample is in, but not those that are needed next."""
        in_use = {name for name, count in self._open.items() if count}
        in_use.update(self.partwise.resident_parts, needed)
        for unused_part in self.partwise.loaded - in_use:
            observer.leave_part(unused_part)
            self.partwise.unload(unused_part)
            storages.leave_part(unused_part)
        # Before the next weights are read.
        self._return_memory()

    def _return_memory(self) -> None:
        if self._returns_memory:
            malloc_trim()

    @contextmanager
    def _hook_modules(
        self,
        sites: Iterable[Site],
        on_product: Callable[[Site, Brought], None],
        on_routing: Callable[[str, list[int]], None] = lambda name, counts: None,
        *,
        stops_at_sites: bool = False,
    ) -> Iterator[None]:
        """Hook all modules, so that they load their parts, and products show their inputs.

        Args:
            stops_at_sites: whether `on_product` stops the batch, where the part of an expert is
                loaded too.
        """
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
                self, module: nn.Module, leaf: str, expert: int | None, brought: Brought
            ) -> None:
                owner = f"{names[module]}.{leaf}".rpartition(".")[0]
                part = passage.partwise.part_of(owner)
                site = site_at.get((names[module], leaf, expert))
                stops_at_inputs = site is not None and stops_at_sites
                # An expert may be a part of its own, which no module has entered yet.
                if not stops_at_inputs and part is not None and part not in passage.partwise.loaded:
                    stop(Part(part))
                if site is not None:
                    on_product(site, brought)

            def visit_output(
                self, module: nn.Module, leaf: str, expert: int | None, output: Tensor
            ) -> Tensor:
                return output

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
