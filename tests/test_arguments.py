"""What is of the wrong type is refused at once, in one line that names the argument, and leaves
nothing behind.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Capture, run

import quantkit
from quantkit.errors import CheckpointError, QualityError, RequestError
from quantkit.jobs.inference.load import load_xla
from quantkit.model.decoder import Decoder
from quantkit.runtime.engine import Engine
from quantkit.text.tokenizer import Tokenizer

Job = Callable[..., object]
INT8 = quantkit.QuantScheme(8, None)
PROMPT = [1, 5, 7]

FLAGS = ("false", "no", "", None, 0, 1, [])
WHOLE = ("2", 2.0, 2.5, True, [2], float("nan"), np.True_, torch.tensor(True))
OPTIONAL_WHOLE = WHOLE
NUMBERS = ("1", None, True, [1.0], np.True_)
PATHS: tuple[Any, ...] = (None, 3, b"model", [], {}, True, "")
SEVERAL: tuple[Any, ...] = (None, 3, b"model", {"a": 1}, [3], [None])
PROGRESS = (3, "x", True)


@pytest.fixture(scope="module")
def loaded(demo_model: Path) -> tuple[Decoder, Tokenizer]:
    return quantkit.load(demo_model, device="cpu")


@pytest.fixture
def jobs(demo_model: Path, tmp_path: Path, loaded: tuple[Decoder, Tokenizer]) -> dict[str, Job]:
    """Every public function, with all that it needs but what a test gives it."""
    model, tokenizer = loaded
    folders = {"src": demo_model, "dst": tmp_path / "out"}
    quantized = {**folders, "scheme": "int8"}
    chat = quantkit.chat_format(demo_model, tokenizer, "llama2")
    calibrated = {**quantized, "method": "gptq", "calibration": "text.txt"}
    needed: dict[str, tuple[Job, dict[str, Any]]] = {
        "convert": (quantkit.convert, folders),
        "quantize": (quantkit.quantize, quantized),
        "gptq": (quantkit.quantize, calibrated),
        "plan.convert": (quantkit.plan.convert, folders),
        "plan.quantize": (quantkit.plan.quantize, quantized),
        "plan.gptq": (quantkit.plan.quantize, calibrated),
        "plan.generate": (quantkit.plan.generate, {"model": demo_model, "target": "v5e-4"}),
        "verify": (quantkit.verify, {"a": demo_model}),
        "evaluate": (quantkit.evaluate, {"paths": demo_model}),
        "inspect": (quantkit.inspect, {"path": demo_model}),
        "open_checkpoint": (quantkit.open_checkpoint, {"path": demo_model}),
        "load": (quantkit.load, {"path": demo_model}),
        "load_xla": (load_xla, {"path": demo_model}),
        "generate": (quantkit.generate, {"model": model, "ids": PROMPT}),
        "stream": (quantkit.stream, {"model": model, "tokenizer": tokenizer, "prompt": "The"}),
        "generate_batch": (
            quantkit.generate_batch,
            {"model": model, "prompts": ["The"], "tokenizer": tokenizer},
        ),
        "Engine": (Engine, {"model": model, "length": 20}),
        "chat_format": (
            quantkit.chat_format,
            {"folder": demo_model, "tokenizer": tokenizer, "template": "llama2"},
        ),
        "ChatSession": (
            quantkit.ChatSession,
            {"model": model, "tokenizer": tokenizer, "chat": chat, "context": 60},
        ),
        "ask": (quantkit.ChatSession(model, tokenizer, chat, context=60).ask, {"text": "Who?"}),
        "chat.encode": (chat.encode, {}),
        "encode": (tokenizer.encode, {"text": "The"}),
        "decode": (tokenizer.decode, {"ids": PROMPT}),
        "QuantScheme": (quantkit.QuantScheme, {"bits": 4, "group_size": 64}),
        "Override": (quantkit.Override, {"pattern": "*", "scheme": None}),
        "Recipe": (quantkit.Recipe, {"default": INT8}),
        "from_json": (quantkit.Recipe.from_json, {}),
    }

    def of(function: Job, arguments: dict[str, Any]) -> Job:
        return lambda **given: function(**{**arguments, **given})

    return {name: of(*one) for name, one in needed.items()}


WRONG: tuple[tuple[str, tuple[str, ...], tuple[Any, ...]], ...] = (
    ("convert", ("resume", "allow_nonfinite", "source_check"), FLAGS),
    ("plan.convert", ("resume", "allow_nonfinite", "source_check"), FLAGS),
    *(
        (
            name,
            (
                "thorough",
                "strict",
                "accept_quality_loss",
                "resume",
                "allow_nonfinite",
                "source_check",
            ),
            FLAGS,
        )
        for name in ("quantize", "plan.quantize", "gptq")
    ),
    ("evaluate", ("speed", "allow_slow"), FLAGS),
    ("load", ("allow_slow",), FLAGS),
    ("load_xla", ("multi_host",), FLAGS),
    ("stream", ("specials",), FLAGS),
    ("encode", ("specials",), FLAGS),
    ("QuantScheme", ("symmetric",), FLAGS),
    ("convert", ("mp",), (*WHOLE, None)),
    ("plan.convert", ("mp",), (*WHOLE, None)),
    ("gptq", ("samples", "length", "seed"), WHOLE),
    ("plan.gptq", ("samples", "length", "seed"), WHOLE),
    ("gptq", ("activation_memory",), ("4GB", True, [1])),
    ("plan.generate", ("batch",), (*WHOLE, None)),
    ("plan.generate", ("context",), WHOLE),
    ("evaluate", ("window",), WHOLE),
    ("load_xla", ("devices",), WHOLE),
    *((name, ("max_new_tokens",), (*WHOLE, None)) for name in ("generate", "stream")),
    *((name, ("seed",), WHOLE) for name in ("generate", "stream")),
    *((name, ("temperature", "top_p"), NUMBERS) for name in ("generate", "stream")),
    ("generate", ("temperature",), (10**400,)),
    ("Engine", ("draft_tokens",), WHOLE),
    ("QuantScheme", ("bits",), (*WHOLE, 4.0, None)),
    ("QuantScheme", ("group_size",), ("128", 64.0, True)),
    *(
        (name, ("src", "dst"), PATHS)
        for name in ("convert", "quantize", "plan.convert", "plan.quantize")
    ),
    ("gptq", ("calibration",), ("", 3, b"text")),
    ("verify", ("a", "b"), PATHS),
    *(
        (name, ("path",), PATHS)
        for name in ("inspect", "open_checkpoint", "load", "load_xla", "from_json")
    ),
    ("evaluate", ("paths",), (*SEVERAL, [], "", [""])),
    ("evaluate", ("texts",), (*SEVERAL, "", [""])),
    ("evaluate", ("tasks",), SEVERAL),
    ("evaluate", ("against", "task_data", "cache_logits"), ("", 3, b"model", ["a"])),
    ("plan.generate", ("model",), PATHS),
    ("plan.generate", ("target",), (None, 4)),
    *((name, ("keep",), SEVERAL) for name in ("quantize", "plan.quantize")),
    *((name, ("base_model", "license"), (3, ["x"])) for name in ("quantize", "plan.quantize")),
    *((name, ("to",), (3, [])) for name in ("convert", "quantize", "plan.quantize")),
    ("quantize", ("method",), (3, ["gptq"])),
    *(
        (name, ("weights",), (3, []))
        for name in ("convert", "quantize", "inspect", "open_checkpoint", "load")
    ),
    ("load", ("device",), (3, [], True)),
    ("load", ("backend",), (3, [])),
    ("quantize", ("group",), (None, 3)),
    ("evaluate", ("group",), (None, 3)),
    ("load", ("tp",), (None, 2)),
    *(
        (name, ("progress",), PROGRESS)
        for name in ("convert", "quantize", "verify", "evaluate", "load", "load_xla")
    ),
    ("generate", ("model",), ("g4", None, (1, 2))),
    ("stream", ("model",), ("g4", None, (1, 2))),
    ("stream", ("tokenizer",), ("g4", None)),
    ("generate_batch", ("model",), ("g4", None, (1, 2))),
    (
        "generate_batch",
        ("prompts",),
        ("The", b"The", None, 3, {"a": 1}, torch.tensor(3), np.array(3)),
    ),
    ("generate_batch", ("stop",), (3, b"x", torch.tensor(3))),
    *(
        (name, ("tokenizer",), ("g4", 3))
        for name in ("generate_batch", "chat_format", "ChatSession")
    ),
    *((name, ("tokenizer",), (None,)) for name in ("chat_format", "ChatSession")),
    ("Engine", ("model",), ("g4", None, (1, 2))),
    ("Engine", ("length", "slots"), (*WHOLE, None, 0, -3)),
    ("Engine", ("compiled",), ("no", 0, 1, [])),
    ("Engine", ("cache_dtype",), ("int4", 8, True, [], torch.int32, torch.float64)),
    ("ChatSession", ("context",), (*WHOLE, 0, -3, 10**6)),
    ("ask", ("text",), (None, b"x", 3)),
    ("ask", ("interrupted",), (True, 0)),
    ("chat.encode", ("messages",), (None, 5, "Who?", {"role": "user", "content": "Who?"})),
    ("Engine", ("draft",), ("g4", (1, 2))),
    ("encode", ("text",), (None, b"x", ["x"], 3)),
    ("Override", ("pattern",), (3, None)),
    ("Override", ("scheme",), ("int8", 3)),
    ("Recipe", ("default",), ("int8", None)),
    ("Recipe", ("overrides",), ([{"pattern": "*"}], {}, "lm_head", None)),
    (
        "decode",
        ("ids",),
        (
            None,
            3,
            "abc",
            b"abc",
            [1.0],
            [True],
            {1, 2},
            [-1],
            torch.tensor([[1], [2]]),
            torch.tensor([True]),
        ),
    ),
)


@pytest.mark.parametrize(
    ("job", "argument", "values"),
    [
        pytest.param(job, one, values, id=f"{job}-{one}")
        for job, names, values in WRONG
        for one in names
    ],
)
def test_a_wrong_type_is_refused_in_one_line_that_names_the_argument(
    job: str, argument: str, values: tuple[Any, ...], jobs: dict[str, Job], tmp_path: Path
) -> None:
    for value in values:
        with pytest.raises(RequestError) as caught:
            jobs[job](**{argument: value})
        line = str(caught.value)
        assert f"`{argument}`" in line, value
        assert "\n" not in line
        assert list(tmp_path.iterdir()) == []


def test_what_is_reported_a_wrong_type(jobs: dict[str, Job]) -> None:
    for arguments, line in (
        (
            {"strict": "false"},
            "`strict` is of the wrong type (found 'false', expected True or False)",
        ),
        ({"dst": None}, "`dst` is of the wrong type (found None, expected a path)"),
        ({"src": ""}, "`src` is empty (expected a path)"),
    ):
        with pytest.raises(RequestError, match=f"^{re.escape(line)}$"):
            jobs["quantize"](**arguments)


def test_a_text_does_not_turn_the_gate_off(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(*_: object) -> None:
        raise QualityError("too far")

    monkeypatch.setattr("quantkit.jobs.quantize.verification.require_passed", failed)
    dst: Any = tmp_path / "out"
    with pytest.raises(RequestError, match="`accept_quality_loss`"):
        quantkit.quantize(demo_model, dst, "int8", accept_quality_loss="false")  # type: ignore[arg-type]
    with pytest.raises(QualityError):
        quantkit.quantize(demo_model, dst, "int8", accept_quality_loss=False)
    assert (
        quantkit.quantize(demo_model, dst, "int8", resume=True, accept_quality_loss=True).path
        == dst
    )


def test_verify_of_nothing_is_no_check_of_one_model(demo_model: Path, tmp_path: Path) -> None:
    """A key that a config lacks must not make a comparison pass."""
    quantkit.convert(demo_model, tmp_path / "out")
    config: dict[str, Any] = {}
    with pytest.raises(
        RequestError, match=r"`b` .*found None.*leave it out to check one model alone"
    ):
        quantkit.verify(tmp_path / "out", config.get("reference"))  # type: ignore[call-overload]
    assert isinstance(quantkit.verify(tmp_path / "out"), quantkit.FolderReport)
    assert isinstance(quantkit.verify(tmp_path / "out", demo_model), quantkit.VerifyReport)


@pytest.mark.slow
def test_none_listens_to_no_progress(demo_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The people of the United States. " * 40)
    quantkit.load(demo_model, device="cpu", progress=None)
    quantkit.convert(demo_model, tmp_path / "hf", progress=None)
    quantkit.quantize(demo_model, tmp_path / "int8", "int8", progress=None)
    assert quantkit.verify(tmp_path / "int8", progress=None).ok
    assert quantkit.verify(tmp_path / "hf", demo_model, progress=None).is_same
    assert quantkit.evaluate(tmp_path / "hf", texts=text, window=64, progress=None).rows


def test_numbers_of_other_libraries_are_numbers(jobs: dict[str, Job]) -> None:
    drawn = {"max_new_tokens": 5, "temperature": 1.0, "top_p": 0.5, "seed": 3}
    numpys = {
        "max_new_tokens": np.int64(5),
        "temperature": np.float32(1),
        "top_p": np.float64(0.5),
        "seed": np.uint8(3),
    }
    found: Any = [jobs["generate"](**options) for options in (drawn, numpys)]
    assert list(found[0]) == list(found[1])
    scheme = quantkit.QuantScheme(np.int64(4), np.int64(64))  # type: ignore[arg-type]
    assert scheme == quantkit.QuantScheme(4, 64)
    assert type(scheme.bits) is type(scheme.group_size) is int


@pytest.mark.parametrize(
    "prompt",
    [
        {1, 2},
        [True, False],
        torch.tensor([True]),
        np.array([True]),
        [np.True_],
        iter([1, 2]),
        {1: 2},
        {1: 2}.values(),
    ],
)
def test_what_has_no_order_or_holds_truth_values_is_no_prompt(
    prompt: Any, jobs: dict[str, Job]
) -> None:
    for job, name in (("generate", "ids"), ("stream", "prompt")):
        with pytest.raises(RequestError, match="the prompt is not a list of token ids"):
            jobs[job](**{name: prompt})


def test_tokens_beyond_the_vocabulary_are_left_out(loaded: tuple[Decoder, Tokenizer]) -> None:
    tokenizer = loaded[1]
    ids = tokenizer.encode("The people")
    assert tokenizer.decode([10**12, *ids, tokenizer.vocab_size, 2**70]) == tokenizer.decode(ids)
    assert tokenizer.decode(torch.tensor([ids])) == tokenizer.decode(ids)  # type: ignore[arg-type]


def test_a_cache_has_a_type_by_name_or_by_torchs(loaded: tuple[Decoder, Tokenizer]) -> None:
    for dtype, expected in (
        ("int8", torch.int8),
        (torch.int8, torch.int8),
        ("bf16", torch.bfloat16),
        (torch.float16, torch.float16),
        (None, loaded[0].dtype),
    ):
        cache = Engine(loaded[0], 20, cache_dtype=dtype)._cache  # type: ignore[arg-type]
        assert cache.rows(0).keys.rows.dtype == expected


def test_a_tokenizer_of_more_tokens_than_the_model_has_is_refused(
    loaded: tuple[Decoder, Tokenizer], demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another model's."""
    model, tokenizer = quantkit.load(demo_model, device="cpu")
    chat = quantkit.chat_format(demo_model, tokenizer, "llama2")
    tokenizer.vocab_size += 1
    for use in (
        lambda: quantkit.generate_batch(model, [[1]], tokenizer=tokenizer),
        lambda: quantkit.stream(model, tokenizer, [1]),
        lambda: quantkit.ChatSession(Engine(model, 20), tokenizer, chat),
    ):
        with pytest.raises(
            CheckpointError, match="the tokenizer has more tokens than the embedding has rows"
        ):
            use()


@pytest.mark.parametrize("scheme", ["recipe.json", Path("recipe.json")])
def test_a_path_is_no_scheme(scheme: Any, jobs: dict[str, Job]) -> None:
    for job in ("quantize", "plan.quantize"):
        with pytest.raises(
            RequestError, match=r"found 'recipe.json'.*quantkit\.Recipe\.from_json\(path\)"
        ):
            jobs[job](scheme=scheme)


def test_the_command_line_is_not_reported_python(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    code, _, err = run(capfd, "quantize", demo_model, tmp_path / "out", "--scheme", "recipe.json")
    assert code == 2
    assert "unknown quantization scheme (found 'recipe.json'" in err
    assert "quantkit." not in err


def test_a_recipe_is_made_of_overrides(jobs: dict[str, Job]) -> None:
    first = quantkit.Override("model.layers.0.*", None)
    assert quantkit.Recipe(INT8, [first]) == quantkit.Recipe(INT8, (first,))  # type: ignore[arg-type]
    assert quantkit.Recipe(INT8).keeping("lm_head").overrides == (
        quantkit.Override("lm_head", None),
    )


def test_a_text_that_was_not_measured_on_has_no_ratio(demo_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "wiki.txt"
    text.write_text("The people of the United States. " * 40)
    found = quantkit.evaluate(demo_model, texts=text, window=64)
    with pytest.raises(RequestError, match=r"found 'wiki.txt', expected wiki\)"):
        found.perplexity_ratio(found.rows[0], "wiki.txt")
    assert found.perplexity_ratio(found.rows[0], "wiki") is None
