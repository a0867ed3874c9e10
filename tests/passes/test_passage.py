"""Samples on their way through models without weights: they meet what they meet in transformers."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from error_parts import raises
from torch import Tensor, nn

from quantkit.errors import GroupError, UnsupportedError
from quantkit.formats.detect import open_checkpoint
from quantkit.passes.activation_store import ActivationStore
from quantkit.passes.passage import (
    Inputs,
    Observer,
    Passage,
    Routed,
    Survey,
    convert_model_errors,
)
from quantkit.passes.site import Site
from quantkit.via_transformers.lazy_model import LazyModel
from quantkit.via_transformers.sites import find_sites

Tiny = Callable[[str], Path]
KINDS = (
    "llama",
    "mixtral",
    "qwen3_next",
    "gpt_oss",
    "gemma3_text",
    "bloom",
    "opt",
    "falcon_h1",
    "deepseek_v3",
    "cohere2",
)
TOKENS = list(torch.split(oracle.random_tokens(40, 3, 2000), 1))


def _surveyed(folder: Path) -> tuple[Passage, list[Site], Survey]:
    """A passage, the sites of all linears in blocks, and how a sample reaches them."""
    lazy = LazyModel(open_checkpoint(folder, tensors_only=True))
    parts = {
        name: lazy.part_of(target.rpartition(".")[0]) for name, (target, _) in lazy.targets.items()
    }
    linears = [
        name
        for name, part in parts.items()
        if name.endswith(".weight") and lazy.is_listed(part or "")
    ]
    matrices = [name.removesuffix(".weight") for name in linears if len(lazy.shape(name)) == 2]
    passage, sites = Passage(lazy, folder), find_sites(lazy, matrices)[0]
    return passage, sites, passage.survey(sites, TOKENS[0])


def _require_unloaded(passage: Passage) -> None:
    assert all(parameter.is_meta for parameter in passage.partwise.model.parameters())
    assert not any(
        one._forward_hooks or one._forward_pre_hooks for one in passage.partwise.model.modules()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_logits_are_those_of_transformers(kind: str, tiny_model: Tiny) -> None:
    model, states = oracle.load(tiny_model(kind)), list[Tensor]()
    passage = Passage(
        LazyModel(open_checkpoint(tiny_model(kind), tensors_only=True)), tiny_model(kind)
    )
    model.get_output_embeddings().register_forward_pre_hook(lambda _, args: states.append(args[0]))
    expected = [oracle.logits(model, tokens) for tokens in TOKENS]
    found = passage.compute_hidden_states(TOKENS)
    torch.testing.assert_close(found, states)
    torch.testing.assert_close(
        passage.compute_logits(torch.cat(found, dim=1)[0]), torch.cat(expected, dim=1)[0]
    )
    _require_unloaded(passage)


def _seen(
    passage: Passage, survey: Survey, store: ActivationStore
) -> dict[tuple[int, Any], Tensor]:
    """What batches bring to groups, and to experts."""
    found: dict[tuple[int, Any], Tensor] = {}

    class Seeing(Observer):
        def arrive(self, index: int, place: Any, value: Any) -> None:
            if isinstance(place, Inputs):
                found[index, place] = value.inputs.clone()
                if value.at is not None:
                    found[index, (place, "all")] = value.at(None).clone()
                    torch.testing.assert_close(value.at(value.tokens), value.inputs)
            elif isinstance(place, Routed):
                found[index, place] = torch.tensor(value)

    places = passage.iterate_inputs(survey.groups, TOKENS, store, Seeing())
    assert tuple(place for place in places if isinstance(place, Inputs)) == survey.groups
    _require_unloaded(passage)
    return found


def _met(model: Any) -> dict[tuple[int, str], tuple[Tensor, ...]]:
    """What each module of transformers' model gets, by the number of the batch."""
    found: dict[tuple[int, str], tuple[Tensor, ...]] = {}
    numbers: Any = itertools.count()
    model.register_forward_pre_hook(lambda *_: setattr(model, "number", next(numbers)))
    for name, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda _, args, name=name: found.update({(model.number, name): args})
        )
    for tokens in TOKENS:
        oracle.logits(model, tokens)
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", KINDS)
def test_linears_get_what_they_get_in_transformers_also_if_all_is_spilled(
    kind: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    passage, _, survey = _surveyed(tiny_model(kind))
    store = ActivationStore(tmp_path / "spill")
    found, spilled = _seen(passage, survey, ActivationStore()), _seen(passage, survey, store)
    assert store.spilled_bytes > 0
    assert found.keys() == spilled.keys()
    assert all(torch.equal(found[key], spilled[key]) for key in found)
    met = _met(oracle.load(tiny_model(kind)))
    single = [
        (group, site) for group in survey.groups for site in group.sites if site.expert is None
    ]
    assert single
    for index, (group, site) in ((index, one) for index in range(len(TOKENS)) for one in single):
        torch.testing.assert_close(found[index, group], met[index, site.module][0])


def test_experts_get_the_tokens_that_they_get_in_transformers(tiny_model: Tiny) -> None:
    passage, _, survey = _surveyed(tiny_model("mixtral"))
    found, model = (
        _seen(passage, survey, ActivationStore()),
        oracle.load(tiny_model("mixtral")).requires_grad_(False),
    )
    met = _met(model)
    stacked = [
        (group, site) for group in survey.groups for site in group.sites if site.expert is not None
    ]
    assert len(stacked) == 2 * 4 * 2  # blocks, experts, products
    for index, (group, site) in ((index, one) for index in range(len(TOKENS)) for one in stacked):
        states, chosen, _ = met[index, site.module]
        tokens = chosen.eq(site.expert or 0).any(-1).nonzero()[:, 0]
        assert found[index, Routed(site.module)][site.expert] == len(tokens) > 0
        if site.leaf == "down_proj":
            gate, up = (
                states @ model.get_submodule(site.module).gate_up_proj[site.expert].t()
            ).chunk(2, -1)
            states = nn.functional.silu(gate) * up
        torch.testing.assert_close(found[index, group], states[tokens])
        torch.testing.assert_close(found[index, (group, "all")], states)


def test_one_block_at_a_time_has_weights_and_gets_them_once(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    passage, _, _ = _surveyed(tiny_model("llama"))
    lazy, load, read, reported = passage.partwise, passage.partwise.load, list[str](), list[Any]()

    def watched(part: str) -> None:
        load(part)
        read.append(part)
        there = {
            lazy.part_of(n.rpartition(".")[0])
            for n, p in lazy.model.named_parameters()
            if not p.is_meta
        }
        assert sum(lazy.is_listed(one) for one in there if one) <= 1

    monkeypatch.setattr(lazy, "load", watched)
    passage.compute_hidden_states(TOKENS, lambda *now: reported.append(now))
    assert sorted(read) == sorted(set(lazy.parts) - {"lm_head"})
    assert reported == [("layers", done, 2, "layers") for done in range(3)]


ATTENTION, MLP = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}
LAYOUTS: dict[str, tuple[list[set[str]], str]] = {  # groups of each block, and what is not reached
    "llama": ([ATTENTION, {"o_proj"}, MLP, {"down_proj"}], ""),
    "cohere2": ([ATTENTION | MLP, {"o_proj"}, {"down_proj"}], ""),
    "bart": ([ATTENTION, {"out_proj"}, {"fc1"}, {"fc2"}], "encoder_attn"),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_linears_with_one_input_are_a_group_and_those_without_are_named(
    kind: str, tiny_model: Tiny
) -> None:
    groups, left = LAYOUTS[kind]
    _, sites, survey = _surveyed(tiny_model(kind))
    assert [
        {site.module.rpartition(".")[2] for site in group.sites} for group in survey.groups
    ] == groups * 2
    assert set(survey.unreached) == {site for site in sites if left and left in site.module}
    assert bool(survey.unreached) == bool(left)
    assert not survey.repeated


def test_linears_that_a_sample_passes_several_times_are_groups_once(tiny_model: Tiny) -> None:
    _, sites, survey = _surveyed(tiny_model("hrm_text"))
    assert all(group.is_repeated for group in survey.groups)
    assert sorted(
        (site for group in survey.groups for site in group.sites), key=lambda site: site.parameter
    ) == sorted(sites, key=lambda site: site.parameter)
    queries = next(group for group in survey.groups if "q_proj" in group.sites[0].module)
    leaves = {site.module.rpartition(".")[2] for site in queries.sites}
    assert leaves == {"q_proj", "k_proj", "v_proj", "gate_proj"}
    assert not survey.repeated
    assert not survey.unreached


def test_code_that_fails_is_reported_with_its_module(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    passage, sites, _ = _surveyed(tiny_model("llama"))
    monkeypatch.setattr(
        passage.partwise.model.model.layers[1].mlp.act_fn, "forward", lambda _: 1 / 0
    )
    for run in (
        lambda: passage.compute_hidden_states(TOKENS),
        lambda: passage.survey(sites, TOKENS[0]),
    ):
        with raises(UnsupportedError, "'model.layers.1.mlp.act_fn'", "ZeroDivision") as caught:
            run()
        assert caught.value.exit_code == 4
        _require_unloaded(passage)


def test_gradients_warnings_and_logs_are_as_before(tiny_model: Tiny) -> None:
    def state() -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            list(warnings.filters),
            logging.getLogger("transformers").level,
        )

    passage, _, survey = _surveyed(tiny_model("llama"))
    before = state()
    passage.compute_hidden_states(TOKENS)
    assert state() == before
    rounds = passage.iterate_inputs(survey.groups, TOKENS, ActivationStore(), Observer())
    assert next(iter(rounds)) == survey.groups[0]
    assert state() == before


def test_inputs_are_shown_again_on_request(tiny_model: Tiny) -> None:
    passage, _, survey = _surveyed(tiny_model("llama"))
    arrived: list[tuple[int, Any, Tensor]] = []

    class Seeing(Observer):
        def arrive(self, index: int, place: Any, value: Any) -> None:
            if isinstance(place, Inputs):
                arrived.append((index, place, value.inputs.clone()))

    first, last = survey.groups[0], survey.groups[-1]
    requests = [first, last, last]
    for place in passage.iterate_inputs(survey.groups, TOKENS, ActivationStore(), Seeing()):
        if place in requests:
            assert isinstance(place, Inputs)
            requests.remove(place)
            passage.repeat_inputs()
    _require_unloaded(passage)
    count = len(TOKENS)
    assert [place for _, place, _ in arrived[: 2 * count]] == [first] * 2 * count
    assert [place for _, place, _ in arrived[-3 * count :]] == [last] * 3 * count
    for index in range(count):
        assert torch.equal(arrived[index][2], arrived[count + index][2])


def test_a_lost_process_is_no_error_of_the_models_code(tmp_path: Path) -> None:
    with raises(GroupError), convert_model_errors(tmp_path):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer")
    with raises(UnsupportedError, path=tmp_path), convert_model_errors(tmp_path):
        raise RuntimeError("shape '[2, 3]' is invalid for input of size 5")
