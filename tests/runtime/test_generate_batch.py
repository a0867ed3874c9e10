"""Many prompts through one call: each as if it were alone, and what people get wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vocabularies import train

import quantkit
from quantkit.errors import RequestError
from quantkit.model.decoder import Decoder
from quantkit.runtime.engine import Engine
from quantkit.runtime.request import Completion
from quantkit.text.export import export_json
from quantkit.text.tokenizer import Tokenizer, load_tokenizer

PROMPTS = [
    "My fellow citizens",
    "The",
    "It is the duty of Congress to see that the laws",
    "Größe, 日本語",
    (
        "We hold these truths to be self-evident, that all men are created equal, that they are"
        " endowed"
    ),
]
NEW = 12


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Decoder:
    return quantkit.load(demo_model, device="cpu", dtype="fp32")[0]


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return quantkit.load(demo_model, device="cpu")[1]


def _plain(model: Decoder, ids: Sequence[int]) -> Tensor:
    """Log-probabilities [T, V] of what follows each token, by one forward pass."""
    with torch.inference_mode():
        return model(torch.tensor([list(ids)]), torch.arange(len(ids)))[0].float().log_softmax(-1)


def _texts(found: list[Completion]) -> list[str]:
    assert all(one.text is not None for one in found)
    return [one.text or "" for one in found]


# What comes out


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_each_prompt_goes_on_as_if_it_were_alone(
    batch_size: int, model: Decoder, tokenizer: Tokenizer
) -> None:
    found = quantkit.generate_batch(
        model, PROMPTS, tokenizer=tokenizer, max_new_tokens=NEW, batch_size=batch_size
    )
    assert [(one.prompt, one.sample) for one in found] == [
        (number, 0) for number in range(len(PROMPTS))
    ]
    for prompt, one in zip(PROMPTS, found, strict=True):
        ids = tokenizer.encode(prompt)
        assert one.token_ids == list(quantkit.generate(model, ids, max_new_tokens=NEW))
        assert one.text == "".join(quantkit.stream(model, tokenizer, prompt, max_new_tokens=NEW))
        assert (one.finish_reason, one.stop, one.prompt_tokens, one.logprobs) == (
            "length",
            None,
            len(ids),
            None,
        )


def test_prompts_are_texts_ids_or_rows_of_a_tensor(model: Decoder, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(prompt)[:4] for prompt in PROMPTS]
    expected = [list(quantkit.generate(model, one, max_new_tokens=4)) for one in ids]
    assert len({len(one) for one in ids}) == 2
    rows = torch.tensor([one for one in ids if len(one) == 4])
    for prompts, wanted in (
        (ids, expected),
        ((one for one in ids), expected),
        ([torch.tensor(one) for one in ids], expected),
        (rows, [one for one, prompt in zip(expected, ids, strict=True) if len(prompt) == 4]),
    ):
        found = quantkit.generate_batch(model, prompts, max_new_tokens=4)
        assert [one.token_ids for one in found] == wanted
        assert {one.text for one in found} == {None}
    mixed = quantkit.generate_batch(
        model, [PROMPTS[0], ids[1]], tokenizer=tokenizer, max_new_tokens=4
    )
    assert [one.token_ids for one in mixed] == expected[:2]


def test_an_engine_is_used_as_it_is(model: Decoder, tokenizer: Tokenizer) -> None:
    engine = Engine(model, 60, slots=2)
    expected = quantkit.generate_batch(model, PROMPTS, tokenizer=tokenizer, max_new_tokens=NEW)
    for _ in range(2):
        assert (
            quantkit.generate_batch(engine, PROMPTS, tokenizer=tokenizer, max_new_tokens=NEW)
            == expected
        )
    with pytest.raises(RequestError, match=r"prompt 2: prompt and new tokens exceed the engine"):
        quantkit.generate_batch(engine, PROMPTS, tokenizer=tokenizer, max_new_tokens=50)
    (found,) = quantkit.generate_batch(
        engine, PROMPTS[4:], tokenizer=tokenizer, max_new_tokens=50, truncate=True
    )
    assert (found.prompt_tokens, len(found.token_ids)) == (10, 50)


def test_no_prompts_are_no_completions_but_wrong_options_are_reported(model: Decoder) -> None:
    assert quantkit.generate_batch(model, []) == []
    with pytest.raises(RequestError, match="temperature"):
        quantkit.generate_batch(model, [], temperature=-1)


def test_n_samples_have_seeds_that_count_up(model: Decoder, tokenizer: Tokenizer) -> None:
    found = quantkit.generate_batch(
        model,
        PROMPTS[:2],
        tokenizer=tokenizer,
        max_new_tokens=NEW,
        n=3,
        temperature=1.0,
        top_p=0.9,
        seed=5,
    )
    assert [(one.prompt, one.sample) for one in found] == [
        (a, b) for a in range(2) for b in range(3)
    ]
    for one in found:
        pieces = quantkit.stream(
            model,
            tokenizer,
            PROMPTS[one.prompt],
            max_new_tokens=NEW,
            temperature=1.0,
            top_p=0.9,
            seed=5 + one.sample,
        )
        assert one.text == "".join(pieces)
    assert len(set(_texts(found))) == len(found)


def test_an_end_token_ends_a_prompt_and_the_others_go_on(
    model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantkit.generate_batch(model, PROMPTS, tokenizer=tokenizer, max_new_tokens=NEW)
    end = whole[0].token_ids[5]
    monkeypatch.setattr(model, "config", replace(model.config, eos_token_ids=(end,)))
    found = quantkit.generate_batch(
        model, PROMPTS, tokenizer=tokenizer, max_new_tokens=NEW, logprobs=0
    )
    assert found[0].finish_reason == "stop"
    for one, before in zip(found, whole, strict=True):
        cut = before.token_ids.index(end) if end in before.token_ids else NEW
        assert one.token_ids == before.token_ids[:cut]
        assert one.finish_reason == ("stop" if cut < NEW else "length")
        assert one.logprobs is not None
        assert len(one.logprobs.tokens) == cut


# Stop strings


@pytest.mark.slow
def test_a_stop_string_is_found_wherever_tokens_begin(model: Decoder, tokenizer: Tokenizer) -> None:
    """Every part of the text, most of which begin or end within tokens."""
    (whole,) = _texts(
        quantkit.generate_batch(model, PROMPTS[:1], tokenizer=tokenizer, max_new_tokens=NEW)
    )
    stops = sorted(
        {whole[at : at + size] for size in (1, 3, 6) for at in range(len(whole) - size + 1)}
    )
    for stop in stops:
        (one,) = quantkit.generate_batch(
            model, PROMPTS[:1], tokenizer=tokenizer, max_new_tokens=NEW, stop=stop
        )
        assert (one.text, one.finish_reason, one.stop) == (whole[: whole.index(stop)], "stop", stop)
        assert stop in tokenizer.decode([*tokenizer.encode(PROMPTS[0]), *one.token_ids])
        assert (
            stop
            not in tokenizer.decode([*tokenizer.encode(PROMPTS[0]), *one.token_ids[:-1]])[
                len(PROMPTS[0]) :
            ]
        )


def test_the_first_of_several_stop_strings_counts(model: Decoder, tokenizer: Tokenizer) -> None:
    (whole,) = _texts(
        quantkit.generate_batch(model, PROMPTS[:1], tokenizer=tokenizer, max_new_tokens=NEW)
    )
    stops = [whole[8:12], "not there", whole[2:4], whole + "more"]
    (one,) = quantkit.generate_batch(
        model, PROMPTS[:1], tokenizer=tokenizer, max_new_tokens=NEW, stop=stops
    )
    assert (one.text, one.stop) == (whole[:2], whole[2:4])
    (one,) = quantkit.generate_batch(
        model, PROMPTS[:1], tokenizer=tokenizer, max_new_tokens=NEW, stop=stops[3]
    )
    assert (one.text, one.finish_reason, one.stop) == (whole, "length", None)


def test_a_stop_string_in_the_prompt_ends_nothing(model: Decoder, tokenizer: Tokenizer) -> None:
    (one,) = quantkit.generate_batch(
        model, PROMPTS[:1], tokenizer=tokenizer, max_new_tokens=NEW, stop="My fellow", echo=True
    )
    assert one.text is not None
    assert one.text.startswith(PROMPTS[0])
    assert one.finish_reason == "length"


@pytest.mark.parametrize("stop", ["日本", "本", "ß", "🚀", "e\u0301"])
def test_stop_strings_of_letters_that_span_tokens(
    stop: str, model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is made to say them, byte by byte."""
    tokens = tokenizer.encode(f"x a {stop} b c", bos=False)[len(tokenizer.encode("x", bos=False)) :]
    assert len(tokens) > 4
    coming = iter(tokens)

    def head(hidden: Tensor) -> Tensor:
        said = torch.tensor([next(coming)] * len(hidden))
        return torch.nn.functional.one_hot(said, model.config.vocab_size).float()

    monkeypatch.setattr(model, "head", head)
    (one,) = quantkit.generate_batch(
        model, ["x"], tokenizer=tokenizer, max_new_tokens=len(tokens), stop=stop
    )
    assert (one.text, one.finish_reason, one.stop) == (" a ", "stop", stop)
    assert len(list(coming)) >= len(tokenizer.encode(" b c", bos=False)) - 1


# Log-probabilities


@pytest.mark.parametrize("echo", [False, True])
def test_log_probabilities_are_those_of_a_plain_forward_pass(
    echo: bool, model: Decoder, tokenizer: Tokenizer
) -> None:
    found = quantkit.generate_batch(
        model,
        PROMPTS,
        tokenizer=tokenizer,
        max_new_tokens=NEW,
        temperature=0.7,
        top_k=20,
        seed=1,
        logprobs=3,
        echo=echo,
        batch_size=3,
    )
    for prompt, one in zip(PROMPTS, found, strict=True):
        ids = tokenizer.encode(prompt)
        whole = one.token_ids if echo else [*ids, *one.token_ids]
        assert whole[: len(ids)] == ids
        assert one.text == (f"{prompt}" if echo else "") + tokenizer.decode(whole)[len(prompt) :]
        assert one.logprobs is not None
        reported, top = one.logprobs.tokens, one.logprobs.top
        assert len(reported) == len(top) == len(one.token_ids)
        if echo:
            assert (reported[0], top[0]) == (None, {})
        start = 1 if echo else 0
        plain = _plain(model, whole)[len(whole) - len(reported) + start - 1 : -1]
        expected = plain.gather(
            -1, torch.tensor(whole[len(whole) - len(reported) + start :])[:, None]
        )[:, 0]
        torch.testing.assert_close(torch.tensor(reported[start:]), expected, rtol=0, atol=2e-4)
        best = plain.topk(3)
        for place, values, tokens in zip(
            top[start:], best.values, best.indices.tolist(), strict=True
        ):
            assert list(place) == tokens
            torch.testing.assert_close(
                torch.tensor(list(place.values())), values, rtol=0, atol=2e-4
            )
        assert json.loads(json.dumps(one.to_json()))["logprobs"]["tokens"] == reported


def test_a_prompt_is_scored_without_new_tokens(model: Decoder, tokenizer: Tokenizer) -> None:
    found = quantkit.generate_batch(
        model, PROMPTS, tokenizer=tokenizer, max_new_tokens=0, echo=True, logprobs=0
    )
    for prompt, one in zip(PROMPTS, found, strict=True):
        ids = tokenizer.encode(prompt)
        assert (one.token_ids, one.text, one.finish_reason) == (ids, prompt, "length")
        assert one.logprobs is not None
        expected = _plain(model, ids)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(one.logprobs.tokens[1:]), expected, rtol=0, atol=2e-4
        )
    with pytest.raises(RequestError, match="nothing to generate"):
        quantkit.generate_batch(model, PROMPTS, tokenizer=tokenizer, max_new_tokens=0)
    with pytest.raises(RequestError, match="one result"):
        quantkit.generate_batch(
            model, PROMPTS, tokenizer=tokenizer, max_new_tokens=0, echo=True, logprobs=0, n=2
        )


def test_echo_alone_repeats_the_prompt(model: Decoder, tokenizer: Tokenizer) -> None:
    plain = quantkit.generate_batch(model, PROMPTS, tokenizer=tokenizer, max_new_tokens=4)
    echoed = quantkit.generate_batch(
        model, PROMPTS, tokenizer=tokenizer, max_new_tokens=4, echo=True
    )
    for prompt, one, other in zip(PROMPTS, plain, echoed, strict=True):
        assert other.token_ids == [*tokenizer.encode(prompt), *one.token_ids]
        assert other.token_ids[other.prompt_tokens :] == one.token_ids
        assert other.text == prompt + (one.text or "")
        assert other.logprobs is None


# Too long prompts


def test_too_long_a_prompt_is_reported_by_its_number_or_cut(
    model: Decoder, tokenizer: Tokenizer
) -> None:
    bos, context = tokenizer.encode("")[0], model.config.max_context
    long = [bos, *(5 + at % 90 for at in range(context))]
    with pytest.raises(
        RequestError,
        match=r"prompt 1: prompt and new tokens exceed the model's context \(found 4105",
    ):
        quantkit.generate_batch(model, [[bos, 7], long], max_new_tokens=8)
    short, cut = quantkit.generate_batch(
        model, [[bos, 7], long], max_new_tokens=8, truncate=True, echo=True
    )
    assert short.token_ids[:2] == [bos, 7]
    assert cut.prompt_tokens == context - 8
    assert cut.token_ids[: cut.prompt_tokens] == [bos, *long[-(context - 9) :]]
    with pytest.raises(RequestError, match="exceed the model's context"):
        quantkit.generate_batch(model, [long], max_new_tokens=context, truncate=True)


# Wrong arguments


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompts": "text"}, ("`prompts` is of the wrong type", "several prompts in a list")),
        ({"prompts": b"text"}, ("`prompts` is of the wrong type",)),
        ({"prompts": {"input_ids": [[1, 2]]}}, ("`prompts` is of the wrong type",)),
        ({"prompts": None}, ("`prompts` is of the wrong type",)),
        ({"prompts": 7}, ("`prompts` is of the wrong type",)),
        ({"prompts": [1, 2]}, ("prompt 0: is not a list of token ids", "found int")),
        ({"prompts": [[1], None]}, ("prompt 1: is not a list of token ids", "found NoneType")),
        ({"prompts": [[1], []]}, ("prompt 1: is empty",)),
        ({"prompts": ["a", ""]}, ("prompt 1: is empty",)),
        ({"prompts": ["a", "\ud800"]}, ("prompt 1: the text is not valid Unicode",)),
        (
            {"prompts": ["a", [3, 9999]]},
            ("prompt 1: contains token ids outside the vocabulary", "0 to 2047"),
        ),
        (
            {"tokenizer": None},
            ("prompt 0: a string prompt requires a tokenizer", "pass `tokenizer`"),
        ),
        ({"tokenizer": "model"}, ("`tokenizer` is of the wrong type", "quantkit.load(path)")),
        ({"model": "model"}, ("`model` is of the wrong type", "quantkit.load(path)")),
        ({"tokenizer": None, "prompts": [[1]], "stop": "."}, ("stop strings require a tokenizer",)),
        ({"stop": ""}, ("a stop string is empty",)),
        ({"stop": 7}, ("`stop` is of the wrong type",)),
        ({"stop": [None]}, ("`stop` is of the wrong type",)),
        ({"max_new_tokens": 0}, ("nothing to generate", "at least 1")),
        (
            {"max_new_tokens": 0, "echo": True},
            ("nothing to generate", "both `echo` and `logprobs`"),
        ),
        (
            {"max_new_tokens": 0, "logprobs": 1},
            ("nothing to generate", "both `echo` and `logprobs`"),
        ),
        ({"max_new_tokens": "9"}, ("`max_new_tokens` is of the wrong type",)),
        ({"max_new_tokens": 10**6}, ("exceed the model's context", "lower `max_new_tokens`")),
        ({"n": 0}, ("`n` must be at least 1",)),
        ({"n": 1.5}, ("`n` is of the wrong type",)),
        ({"logprobs": True}, ("`logprobs` is of the wrong type",)),
        ({"logprobs": -1}, ("logprobs is out of range", "0 to 100")),
        ({"logprobs": 101}, ("logprobs is out of range",)),
        ({"echo": "no"}, ("`echo` is of the wrong type",)),
        ({"truncate": 1}, ("`truncate` is of the wrong type",)),
        ({"specials": None}, ("`specials` is of the wrong type",)),
        ({"batch_size": 0}, ("`batch_size` must be at least 1",)),
        ({"batch_size": "8"}, ("`batch_size` is of the wrong type",)),
        ({"progress": 7}, ("`progress` is of the wrong type",)),
        ({"temperature": -1}, ("temperature must",)),
        ({"top_p": 0}, ("top_p must",)),
        ({"repetition_penalty": 1e-300}, ("repetition_penalty must lie in [0.01, 100]",)),
        ({"logit_bias": {5: 1e300}}, ("logit_bias must lie in [-10000, 10000]", "found 1e+300")),
        ({"stop": ["a", "b\udcff"]}, ("a stop string is not valid Unicode", r"found '\udcff'")),
        ({"seed": "x"}, ("`seed` is of the wrong type",)),
        ({"logit_bias": {5000: 1.0}}, ("logit_bias names tokens outside the vocabulary",)),
        (
            {"num_beams": 4},
            ("beam search is not supported", "found num_beams", "draw several samples with `n`"),
        ),
        ({"use_beam_search": True}, ("beam search is not supported",)),
        ({"best_of": 4}, ("beam search is not supported",)),
    ],
    ids=lambda one: repr(one)[:40],
)
def test_what_is_wrong_is_reported_before_anything_is_computed(
    given: dict[str, Any],
    words: tuple[str, ...],
    model: Decoder,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Engine, "step", None)
    arguments = {"model": model, "prompts": ["a", "b"], "tokenizer": tokenizer, **given}
    with pytest.raises(RequestError) as caught:
        quantkit.generate_batch(**arguments)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "prompt prompt" not in str(caught.value)


def test_a_prompt_within_characters_is_echoed_and_continued_byte_by_byte(
    tmp_path: Path, model: Decoder
) -> None:
    """As sentencepiece does it: one bad byte leaves those beside it."""
    train(tmp_path / "pieces")
    (tmp_path / "json").mkdir()
    assert export_json(tmp_path / "pieces" / "tokenizer.model", tmp_path / "json") is not None
    prompt = [1, *(value + 3 for value in (0xB0, *"é\n".encode(), 0xE4, 0xB8))]
    (found,) = quantkit.generate_batch(
        model,
        [prompt],
        tokenizer=load_tokenizer(tmp_path / "json"),
        max_new_tokens=2,
        echo=True,
        logit_bias={0xAD + 3: 100},
    )
    assert found.token_ids == [*prompt, 0xAD + 3, 0xAD + 3]
    assert found.text == "\ufffdé\n\ufffd\ufffd" + "中\ufffd"


def test_an_option_that_there_is_not_is_pythons_own_error(model: Decoder) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_tokens'"):
        quantkit.generate_batch(model, [[1]], max_tokens=3)  # type: ignore[call-arg]


def test_special_tokens_are_plain_text_unless_requested(
    model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[bool] = []
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, *, specials: requested.append(specials) or encode(text)
    )
    quantkit.generate_batch(model, ["x"], tokenizer=tokenizer, max_new_tokens=1)
    quantkit.generate_batch(model, ["x"], tokenizer=tokenizer, max_new_tokens=1, specials=True)
    assert requested == [False, True]


def test_progress_is_reported_every_completion(model: Decoder, tokenizer: Tokenizer) -> None:
    reported: list[tuple[str, int, int, str]] = []
    quantkit.generate_batch(
        model,
        PROMPTS,
        tokenizer=tokenizer,
        max_new_tokens=3,
        n=2,
        progress=lambda *one: reported.append(one),
    )
    assert reported == [("generate", done, 10, "completions") for done in range(11)]
