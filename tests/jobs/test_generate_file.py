"""Files of prompts: what comes of them, in which order, and what is left of a run that is
interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import oracle
import pytest
from command import Capture, run
from partial import partial
from terminal import on_terminal, screen

import quantkit
from quantkit.base.memory import size_text
from quantkit.errors import (
    DestinationError,
    InterruptedRunError,
    NoSpaceError,
    QuantkitError,
    RequestError,
    ResumeError,
)
from quantkit.formats.output.lines import NAME, ResumableLines
from quantkit.jobs.inference.generate_file import GeneratedFile
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate_batch import completions
from quantkit.runtime.request import Request

NEW = 6
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "My fellow citizens", "max_new_tokens": 9, "id": "first"},
    {
        "prompt": "The",
        "n": 3,
        "temperature": 1.2,
        "seed": 5,
        "top_k": 20,
        "min_p": 0.01,
        "stop": ["a", "e"],
        "id": None,
    },
    {"token_ids": [1, 20, 30], "id": {"any": ["JSON", None]}},
    {"prompt": "Größe, 日本語", "logprobs": 2, "echo": True, "repetition_penalty": 1.3},
    {
        "prompt": "It is the duty of Congress to see that the laws",
        "logit_bias": {"5": -100, "263": 2},
        "top_p": None,
    },
    {"prompt": "We hold these truths", "stop": ["e"], "max_new_tokens": 12},
]
COMMAND = "from quantkit.cli.main import main; main()"


def written(path: Path, prompts: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in prompts))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(path: Path) -> list[str]:
    return [one["text"] for one in lines(path)]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return written(tmp_path / "prompts.jsonl", PROMPTS)


@pytest.fixture(scope="module")
def made(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run that nothing interrupts makes of `PROMPTS`."""
    folder = tmp_path_factory.mktemp("whole")
    generated(demo_model, written(folder / "prompts.jsonl", PROMPTS), folder / "out.jsonl")
    return folder / "out.jsonl"


@pytest.fixture
def whole(made: Path) -> list[str]:
    """Its texts."""
    return texts(made)


def generated(model: Path, prompts: Path, out: Path, **options: Any) -> GeneratedFile:
    return quantkit.generate_file(model, prompts, out, max_new_tokens=NEW, device="cpu", **options)


# What comes out


def test_each_line_is_what_generate_batch_gives_alone(demo_model: Path, made: Path) -> None:
    model, tokenizer = quantkit.load(demo_model, device="cpu")
    found = lines(made)
    expected = [
        (number, sample) for number, one in enumerate(PROMPTS) for sample in range(one.get("n", 1))
    ]
    assert [(one["index"], one["sample"]) for one in found] == expected
    for number, requested in enumerate(PROMPTS):
        options = {
            key: value
            for key, value in requested.items()
            if key not in ("id", "prompt", "token_ids") and value
        }
        if "logit_bias" in options:
            options["logit_bias"] = {
                int(token): bias for token, bias in options["logit_bias"].items()
            }
        prompt = requested.get("prompt") or requested["token_ids"]
        alone = quantkit.generate_batch(
            model, [prompt], tokenizer=tokenizer, **{"max_new_tokens": NEW, **options}
        )
        own = [one for one in found if one["index"] == number]
        assert [one["text"] for one in own] == [one.text for one in alone]
        assert [one["finish_reason"] for one in own] == [one.finish_reason for one in alone]
        assert [one["stop"] for one in own] == [one.stop for one in alone]
        assert [one["prompt_tokens"] for one in own] == [one.prompt_tokens for one in alone]
        echoed = alone[0].prompt_tokens if options.get("echo") else 0
        assert [one["completion_tokens"] for one in own] == [
            len(one.token_ids) - echoed for one in alone
        ]
        assert all(one.get("id", "none") == requested.get("id", "none") for one in own)
        assert all(("token_ids" in one) == ("token_ids" in requested) for one in own)
    assert (
        found[4]["token_ids"]
        == quantkit.generate_batch(model, [[1, 20, 30]], max_new_tokens=NEW)[0].token_ids
    )
    assert found[7]["stop"] == "e" and "e" not in found[7]["text"]  # noqa: PT018


def test_log_probabilities_name_the_tokens(demo_model: Path, made: Path) -> None:
    model, tokenizer = quantkit.load(demo_model, device="cpu")
    (found,) = (one for one in lines(made) if "logprobs" in one)
    (alone,) = quantkit.generate_batch(
        model,
        ["Größe, 日本語"],
        tokenizer=tokenizer,
        max_new_tokens=NEW,
        logprobs=2,
        echo=True,
        repetition_penalty=1.3,
    )
    assert alone.logprobs is not None
    reported = found["logprobs"]
    assert [one["token_id"] for one in reported] == alone.token_ids
    assert reported[0]["logprob"] is None and reported[0]["top_logprobs"] == []  # noqa: PT018
    assert [one["logprob"] for one in reported[1:]] == pytest.approx(
        alone.logprobs.tokens[1:], abs=1e-3
    )
    assert [[top["token_id"] for top in one["top_logprobs"]] for one in reported] == [
        list(top) for top in alone.logprobs.top
    ]
    plain = [one["token"] for one in reported if "\ufffd" not in one["token"]]
    assert any(text.startswith(" ") for text in plain)
    assert all(text in found["text"] for text in plain[-3:])


@pytest.mark.parametrize("batch", [1, 3])
def test_a_file_is_the_same_at_any_batch_size(
    batch: int, demo_model: Path, tmp_path: Path, prompts: Path, whole: list[str]
) -> None:
    generated(demo_model, prompts, tmp_path / "out.jsonl", batch_size=batch)
    assert texts(tmp_path / "out.jsonl") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


def test_a_line_wins_over_the_command(demo_model: Path, tmp_path: Path, capfd: Capture) -> None:
    requested = [
        {"prompt": "The people"},
        {"prompt": "The people", "max_new_tokens": 3, "stop": None},
    ]
    requested += [
        {"prompt": "The people", "n": 1, "temperature": 0},
        {"prompt": "The people", "echo": False},
    ]
    prompts, out = written(tmp_path / "in", requested), tmp_path / "out"
    code, said, _ = run(
        capfd,
        "generate",
        demo_model,
        "--prompts",
        prompts,
        "--output",
        out,
        "--max-new-tokens",
        "5",
        "--n",
        "2",
        "--temperature",
        "1",
        "--seed",
        "3",
        "--echo",
        "--logit-bias",
        "263=1",
        "--top-k",
        "50",
    )
    assert code == 0
    found = lines(out)
    assert [one["index"] for one in found] == [0, 0, 1, 1, 2, 3, 3]
    assert [one["completion_tokens"] for one in found] == [5, 5, 3, 3, 5, 5, 5]
    assert [one["text"].startswith("The people") for one in found] == [True] * 5 + [False] * 2
    assert found[5]["text"] == found[0]["text"].removeprefix("The people")
    assert found[4]["text"] != found[0]["text"]
    assert (
        found[2]["text"].removeprefix("The people") == found[0]["text"][10 : len(found[2]["text"])]
    )
    assert said.startswith(f"{out}: 4 prompts, 31 tokens, ")
    assert said.rstrip().endswith(" tokens/s")


def test_conversations_go_by_the_folders_template_and_defaults(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    model = tmp_path / "hf"
    quantkit.convert(demo_model, model, template="llama2", source_check=False)
    (model / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 2.0, "top_k": 1})
    )
    messages = [{"role": "user", "content": "Who are the people?"}]
    requested = [
        {"messages": messages},
        {"messages": messages, "top_k": 0, "seed": 3},
        {"messages": messages, "temperature": 0},
    ]
    generated(model, written(tmp_path / "in", requested), tmp_path / "out")
    likeliest, drawn, greedy = texts(tmp_path / "out")
    assert likeliest == greedy != drawn
    generated(model, tmp_path / "in", tmp_path / "asked", top_k=0, seed=3)
    assert texts(tmp_path / "asked")[0] == drawn
    ids = quantkit.chat_format(model, quantkit.load(model)[1]).encode(messages)
    assert {one["prompt_tokens"] for one in lines(tmp_path / "out")} == {len(ids)}
    code, _, err = run(
        capfd, "generate", demo_model, "--prompts", tmp_path / "in", "--output", tmp_path / "none"
    )
    assert code == 2
    assert f"{demo_model}: has no chat template" in err
    command = ("generate", demo_model, "--prompts", tmp_path / "in", "--output", tmp_path / "meta")
    assert run(capfd, *command, "--template", "llama2", "--max-new-tokens", "2")[0] == 0
    assert lines(tmp_path / "meta")[0]["prompt_tokens"] == len(ids)


def test_a_format_has_end_tokens_of_its_own(demo_model: Path) -> None:
    model, _ = quantkit.load(demo_model, device="cpu")
    tokens = list(quantkit.generate(model, [1, 20, 30], max_new_tokens=NEW))
    request = Request([1, 20, 30], NEW, end_ids=(tokens[3],))
    (found,) = completions(Engine(model, request.length), [request], None, [()])
    assert found.token_ids == tokens[: tokens.index(tokens[3])]
    assert found.finish_reason == "stop"


def test_template_variables_and_tools_reach_the_template(demo_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "hf"
    quantkit.convert(demo_model, model, source_check=False)
    (model / "chat_template.jinja").write_text(
        "{{ messages[0].content }} {{ mood }} {{ tools[0].name if tools }}"
    )
    messages = [{"role": "user", "content": "Hi"}]
    requested = [
        {
            "messages": messages,
            "chat_template_kwargs": {"mood": "well then"},
            "tools": [{"name": "weather"}],
        }
    ]
    generated(model, written(tmp_path / "in", requested), tmp_path / "out", echo=True)
    assert lines(tmp_path / "out")[0]["text"].startswith("Hi well then weather")


@pytest.mark.slow
def test_too_long_a_prompt_is_refused_with_its_line_or_cut(
    demo_model: Path, tmp_path: Path
) -> None:
    prompts = written(tmp_path / "in", [{"prompt": "The"}, {"prompt": "word " * 5000}])
    with pytest.raises(
        RequestError,
        match=r"in:2: prompt and new tokens exceed the model's context \(found \d+, expected",
    ):
        generated(demo_model, prompts, tmp_path / "out")
    generated(demo_model, prompts, tmp_path / "out", truncate=True)
    assert [
        (one["prompt_tokens"] < 10, one.get("truncated")) for one in lines(tmp_path / "out")
    ] == [
        (True, None),
        (False, True),
    ]


def test_lines_go_to_stdout_as_they_come(demo_model: Path, tmp_path: Path, capfd: Capture) -> None:
    requested = [{"prompt": "The", "max_new_tokens": 12}, {"prompt": "A", "max_new_tokens": 2}]
    command = (
        "generate",
        demo_model,
        "--prompts",
        written(tmp_path / "in", requested),
        "--output",
        "-",
    )
    code, out, err = run(capfd, *command)
    assert code == 0
    assert [json.loads(line)["index"] for line in out.splitlines()] == [1, 0]
    assert err.startswith("2 prompts, 14 tokens, ")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_windows_files_and_blank_lines_at_the_end_are_fine(
    demo_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(b'\xef\xbb\xbf{"prompt": "The"}\r\n{"prompt": "A"}\r\n\r\n\n')
    assert generated(demo_model, tmp_path / "in", tmp_path / "out").prompts == 2


def test_spellings_of_special_tokens_are_text_unless_a_line_says_otherwise(
    demo_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "hf"
    quantkit.convert(demo_model, model, source_check=False)
    text = "<s>The"
    tokenizer = quantkit.load(model)[1]
    counts = [len(tokenizer.encode(text, specials=specials)) for specials in (False, True)]
    generated(
        model,
        written(tmp_path / "in", [{"prompt": text}, {"prompt": text, "specials": True}]),
        tmp_path / "out",
    )
    assert [one["prompt_tokens"] for one in lines(tmp_path / "out")] == counts


# What is wrong


@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    ("content", "reported"),
    [
        (b"", "in: the file is empty"),
        (b"\n \n", "in: the file is empty"),
        (b'{"prompt": "a"}\n\n{"prompt": "b"}\n', "in:2: the line is empty"),
        (b'{"prompt": "a"}\n\xff\xfe', "in:2: cannot be decoded (expected UTF-8)"),
        (b'[{"prompt": "a"}]', "in:1: contains a JSON array (expected on each line"),
        (b"prompt,n\nThe,3\n", "in:1: is not a JSON object (found 'prompt,n', expected"),
        (b'{"prompt": "a"}\n{"prompt": "b"', "in:2: is not a JSON object"),
        (b'{"prompt": "a", "id": NaN}', "in:1: is not a JSON object"),
        (b"[" * 100_000, "in:1: contains a JSON array"),
        (
            b'{"prompt": "a", "id": {"x": [1e400]}}',
            "in:1: 'id' contains a number that is too large (expected at most",
        ),
        (
            b'{"prompt": "a", "id": %s}' % (b"9" * 5000),
            "in:1: 'id' contains a number that is too large (expected at most",
        ),
        (b'{"prompt": "a", "top_p": 1e400}', "in:1: 'top_p' contains a number that is too large"),
        (
            b'{"prompt": "a"}\n{"prompt": "b", "id": [1.0000000000000000001]}',
            (
                "in:2: 'id': the number loses precision in JSON (found"
                " '1.0000000000000000001', expected 1.0, "
            ),
        ),
        (
            b'{"prompt": "a", "id": 1e-99999999999999999999}',
            "in:1: 'id': the number loses precision in JSON",
        ),
        (
            b'{"prompt": "a", "id": %s1%s}' % (b"[" * 90, b"]" * 90),
            "in:1: 'id' is nested too deeply",
        ),
        (
            b'{"prompt": "a"}\n{"prompt": "a", "prompt": "b"}',
            "in:2: the key 'prompt' occurs twice",
        ),
        (b'{"prompt": "a", "id": {"": 1, "": 1}}', "in:1: the key '' occurs twice"),
        (b'{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}', "in:1: the key '5' occurs twice"),
        (
            b'{"prompt": "a", "logit_bias": {"0": 1, "00": 2}}',
            "in:1: 'logit_bias' names a token twice (found 0)",
        ),
        (b'{"id": 3}', "in:1: no prompt is given (found id, expected"),
        (b'{"prompt": ""}', "in:1: the prompt is empty"),
        (b'{"token_ids": []}', "in:1: the prompt is empty"),
        (b'{"token_ids": [99999]}', "in:1: the prompt contains token ids outside the vocabulary"),
        (
            b'{"token_ids": "1"}',
            "in:1: 'token_ids' is of the wrong type (found '1', expected a list of token ids)",
        ),
        (
            b'{"prompt": "a", "token_ids": [1]}',
            "in:1: the prompt is given twice (found prompt and token_ids",
        ),
        (b'{"prompt": "a", "tools": []}', "in:1: 'tools' requires 'messages'"),
        (b'{"token_ids": [1], "specials": true}', "in:1: 'specials' requires 'prompt'"),
        (
            b'{"prompt": "a", "max_tokens": 3}',
            "in:1: unknown key 'max_tokens'; did you mean 'max_new_tokens'?",
        ),
        (b'{"promt": "a"}', "in:1: unknown key 'promt'; did you mean 'prompt'?"),
        (
            b'{"prompt": "a", "num_beams": 2}',
            "in:1: beam search is not supported (found num_beams); draw several",
        ),
        (
            b'{"prompt": "a", "temperature": "hot"}',
            "in:1: 'temperature' is of the wrong type (found 'hot'",
        ),
        (
            b'{"prompt": "a", "temperature": -1}',
            "in:1: temperature must be finite and not negative (found -1.0)",
        ),
        (b'{"prompt": "a", "stop": [""]}', "in:1: a stop string is empty"),
        (b'{"prompt": "a", "n": 0}', "in:1: 'n' must be at least 1"),
        (b'{"prompt": "a", "n": 4097}', "in:1: n is out of range (found 4097, expected 1 to 4096)"),
        (
            b'{"prompt": "a", "n": 1%s}' % (b"0" * 90),
            "in:1: n is out of range (found a huge number, expected",
        ),
        (b'{"prompt": "a", "echo": 1}', "in:1: 'echo' is of the wrong type"),
        (b'{"prompt": "a", "logit_bias": {"x": 1}}', "in:1: 'logit_bias' is of the wrong type"),
        (
            b'{"prompt": "a", "logit_bias": {"99999": 1}}',
            "in:1: logit_bias names tokens outside the vocabulary",
        ),
        (b'{"prompt": "\\ud800"}', "in:1: the text is not valid Unicode"),
        (b'{"messages": "hi"}', "has no chat template"),
    ],
)
def test_what_is_wrong_with_a_line_is_reported_before_the_model_is_loaded(
    content: bytes,
    reported: str,
    demo_model: Path,
    tmp_path: Path,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "quantkit.jobs.inference.load.load_opened",
        lambda *_, **__: pytest.fail("the model was loaded"),
    )
    (tmp_path / "in").write_bytes(content)
    code, out, err = run(
        capfd, "generate", demo_model, "--prompts", tmp_path / "in", "--output", tmp_path / "out"
    )
    assert (code, out) == (2, "")
    assert reported in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_id_comes_back_as_it_was_written(demo_model: Path, tmp_path: Path) -> None:
    ids = [
        f"[0.1, -2.50, {10**400}, 9007199254740993, 1e22, 5e-324, 1.0]",
        '"1.0000000000000000001"',
        "0.30000000000000004",
    ]
    (tmp_path / "in").write_text("".join(f'{{"token_ids": [1], "id": {one}}}\n' for one in ids))
    generated(demo_model, tmp_path / "in", tmp_path / "out")
    exactly = [
        json.loads(line, parse_float=Decimal)["id"]
        for line in (tmp_path / "out").read_text().splitlines()
    ]
    assert exactly == [json.loads(one, parse_float=Decimal) for one in ids]


@pytest.mark.parametrize(
    ("options", "line", "reported"),
    [
        (
            "",
            {"response_format": {"type": "json_object"}},
            "in:2: {grammars}; leave out 'response_format'",
        ),
        ("--echo --logprobs 1", {}, "{}; leave out --echo"),
        ("--echo", {"logprobs": 1}, "in:2: {}; leave out 'logprobs'"),
        ("--logprobs 1", {"echo": True}, "in:2: {}; leave out 'echo'"),
        ("", {"echo": True, "logprobs": 0}, "in:2: {}; leave out 'echo'"),
    ],
)
def test_what_xla_does_not_give_is_reported_before_the_model_is_loaded(
    options: str,
    line: dict[str, Any],
    reported: str,
    demo_model: Path,
    tmp_path: Path,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "quantkit.jobs.inference.load.load_xla",
        lambda *_, **__: pytest.fail("the model was loaded"),
    )
    prompts = written(tmp_path / "in", [{"prompt": "The"}, {"prompt": "The", **line}])
    command = (
        "generate",
        demo_model,
        "--prompts",
        prompts,
        "--output",
        tmp_path / "out",
        "--backend",
        "xla",
    )
    code, out, err = run(capfd, *command, *options.split())
    assert (code, out) == (2, "")
    grammars = "XLA does not support constrained answers"
    reported = reported.format(
        "XLA does not support log-probabilities of prompts", grammars=grammars
    )
    assert err.removeprefix("quantkit: error: ").removeprefix(f"{tmp_path}/") == f"{reported}\n"


def test_a_template_that_refuses_a_conversation_is_reported_with_its_line(
    demo_model: Path, tmp_path: Path
) -> None:
    requested = [
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"messages": [{"role": "system", "content": "Be."}]},
    ]
    with pytest.raises(RequestError, match="in:2: llama2 has at most one system message"):
        generated(
            demo_model, written(tmp_path / "in", requested), tmp_path / "out", template="llama2"
        )
    requested[1] = {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        ]
    }
    with pytest.raises(
        RequestError, match="in:2: message parts of type 'image_url' are not supported"
    ):
        generated(
            demo_model, written(tmp_path / "in", requested), tmp_path / "out", template="llama2"
        )


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ("--prompts IN", "--prompts requires --output FILE.jsonl, or --output - for stdout"),
        (
            "--prompts IN --output OUT --prompt x",
            "the prompt is given twice (found --prompt and --prompts",
        ),
        (
            "--prompts IN --output OUT --stats",
            "--draft and --stats cannot be combined with --prompts",
        ),
        ("--prompts IN --output OUT --batch 0", "--batch must be at least 1 (found 0)"),
        ("--prompts IN --output - --resume", "--resume cannot be combined with --output -"),
        ("--prompts IN --output OUT --n 0", "n must be at least 1"),
        (
            "--prompts IN --output OUT --logit-bias 5",
            "not a valid token bias (found '5', expected ID=NUMBER",
        ),
        (
            "--prompts IN --output OUT --logit-bias 5=1 --logit-bias 5=2",
            "--logit-bias names a token twice (found 5)",
        ),
        ("x -n 100000000", "n is out of range (found 100000000, expected 1 to 4096)"),
        (
            "--prompts nowhere --output OUT",
            "nowhere: the prompts cannot be read: No such file or directory",
        ),
        (
            "x --output OUT",
            "--output, --resume, --batch, --template, --echo and --logprobs require --prompts",
        ),
        (
            "x --num-beams 4",
            "beam search is not supported (found --num-beams); draw several samples with --n",
        ),
        ("x --top-k -2", "top_k must not be negative"),
    ],
)
def test_options_that_make_no_sense(
    options: str, reported: str, demo_model: Path, prompts: Path, tmp_path: Path, capfd: Capture
) -> None:
    places = {"IN": prompts, "OUT": tmp_path / "out"}
    code, out, err = run(
        capfd, "generate", demo_model, *(places.get(word, word) for word in options.split())
    )
    assert (code, out) == (2, "")
    assert reported in err


def test_nothing_is_overwritten(demo_model: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(DestinationError, match="exists already; nothing is overwritten"):
        generated(demo_model, prompts, tmp_path / "out")
    with pytest.raises(DestinationError, match="exists already"):
        generated(demo_model, prompts, prompts)
    assert (tmp_path / "out").read_text() == "precious"


# Interruptions


def interrupted(model: Path, prompts: Path, out: Path, done: int = 2, **options: Any) -> None:
    """Run until so many prompts are done, and stop as Ctrl-C does."""

    def progress(phase: str, now: int, total: int, unit: str) -> None:
        if (phase, now) == ("generate", done):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generated(model, prompts, out, progress=progress, **options)
    assert not out.exists()


def test_an_interrupted_run_goes_on_with_what_is_missing(
    demo_model: Path, prompts: Path, tmp_path: Path, whole: list[str]
) -> None:
    out = tmp_path / "out.jsonl"
    interrupted(demo_model, prompts, out)
    with pytest.raises(
        InterruptedRunError,
        match="contains an interrupted run; add `resume=True` to continue it",
    ):
        generated(demo_model, prompts, out)
    interrupted(demo_model, prompts, out, done=4, resume=True)
    reported: list[int] = []
    made = generated(
        demo_model,
        prompts,
        out,
        resume=True,
        batch_size=2,
        progress=lambda phase, now, total, unit: (
            reported.append(now) if phase == "generate" else None
        ),
    )
    assert (made.prompts, made.resumed, reported) == (6, 4, [4, 5, 6])
    assert texts(out) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"finish_reason": "length"', b'"finish_reason": "stop"'),
        (b'"text": "', b'"text": "x'),
        (b'"check": "', b'"check": "0'),
    ],
)
def test_a_line_that_was_changed_meanwhile_is_refused_and_kept(
    old: bytes, new: bytes, demo_model: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    interrupted(demo_model, prompts, out, done=3)
    there = partial(out) / NAME
    content = there.read_bytes()
    changed = content.replace(old, new, 1)
    assert changed != content
    there.write_bytes(changed)
    with pytest.raises(ResumeError, match=r"lines\.jsonl: was not written by the interrupted run"):
        generated(demo_model, prompts, out, resume=True)
    assert there.read_bytes() == changed


def test_a_torn_line_is_dropped(
    demo_model: Path, prompts: Path, tmp_path: Path, whole: list[str]
) -> None:
    """Also one of several of a prompt, which come whole or not at all."""
    out = tmp_path / "out.jsonl"
    interrupted(demo_model, prompts, out, done=6)
    there = partial(out) / NAME
    content = there.read_bytes().splitlines(keepends=True)
    content.sort(key=lambda line: json.loads(line)["index"] == 1)  # the three samples are last
    there.write_bytes(b"".join(content)[:-7])
    assert generated(demo_model, prompts, out, resume=True).resumed == 5
    assert texts(out) == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [b"no JSON\n", b'{"index": 7}\n', b'{"index": "0"}\n', b"[]\n", b'{"index": 0}\n' * 2]
)
def test_a_damaged_partial_file_is_refused_and_kept(
    line: bytes, demo_model: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    interrupted(demo_model, prompts, out, done=1)
    (partial(out) / NAME).write_bytes(line)
    with pytest.raises(ResumeError, match=r"lines\.jsonl: was not written by the interrupted run"):
        generated(demo_model, prompts, out, resume=True)
    assert (partial(out) / NAME).read_bytes() == line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ("option temperature", {"temperature": 1.0}),
        ("option logprobs", {"logprobs": 1}),
        ("option truncate", {"truncate": True}),
        ("option template", {"template": "llama2"}),
        ("option dtype", {"dtype": "fp32"}),
        ("prompts", {}),
        ("model", {}),
    ],
)
def test_other_inputs_or_options_are_not_gone_on_with(
    changed: str, options: dict[str, Any], demo_model: Path, prompts: Path, tmp_path: Path
) -> None:
    model, out = demo_model, tmp_path / "out.jsonl"
    if changed == "model":
        model = tmp_path / "model"
        quantkit.convert(demo_model, model, source_check=False)
    interrupted(model, prompts, out)
    if changed == "prompts":
        written(prompts, [*PROMPTS[:-1], {"prompt": "Another"}])
    if changed == "model":
        oracle.edit_json(model / "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    with pytest.raises(
        ResumeError, match=f"had different inputs or options \\(found changed {changed}"
    ):
        generated(model, prompts, out, resume=True, **options)
    assert (partial(out) / NAME).exists()


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(
    demo_model: Path, prompts: Path, tmp_path: Path, whole: list[str]
) -> None:
    code = (
        "import os, signal, sys\n"
        "from quantkit.formats.output.lines import ResumableLines\n"
        "from quantkit.cli.main import main\n"
        "add = ResumableLines.add\n"
        "def killed(lines, number, what):\n"
        "    add(lines, number, what)\n"
        "    if len(lines.done) == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "ResumableLines.add = killed\n"
        "main()\n"
    )
    command = (
        "generate",
        demo_model,
        "--prompts",
        prompts,
        "--output",
        tmp_path / "out",
        "--max-new-tokens",
        str(NEW),
    )
    assert forked.python(code, *command).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    done = forked.python(COMMAND, *command, "--resume")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'out'}: 6 prompts, 2 of them from before, ")
    assert texts(tmp_path / "out") == whole


def test_ctrl_c_says_what_is_kept(demo_model: Path, prompts: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from quantkit.jobs.inference import generate_file\n"
        "from quantkit.cli.main import main\n"
        "answers = generate_file._continue_lines\n"
        "def stopped(*given):\n"
        "    for count, one in enumerate(answers(*given)):\n"
        "        if count == 1: os.kill(os.getpid(), signal.SIGINT)\n"
        "        yield one\n"
        "generate_file._continue_lines = stopped\n"
        "main()\n"
    )
    done = forked.python(
        code, "generate", demo_model, "--prompts", prompts, "--output", tmp_path / "out"
    )
    assert done.returncode == 130
    assert (
        done.stderr.splitlines()[-1]
        == f"quantkit: interrupted; {partial(tmp_path / 'out')} is kept: add --resume"
    )
    assert "Traceback" not in done.stderr
    assert len(lines(partial(tmp_path / "out") / NAME)) in (1, 3)


def test_a_full_disk_keeps_what_is_there(
    demo_model: Path, prompts: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = ResumableLines.add

    def full(self: ResumableLines, number: int, found: Sequence[Mapping[str, Any]]) -> None:
        if len(self.done) == 1:
            raise NoSpaceError("the disk is full", path=tmp_path)
        add(self, number, found)

    monkeypatch.setattr(ResumableLines, "add", full)
    code, _, err = run(
        capfd, "generate", demo_model, "--prompts", prompts, "--output", tmp_path / "out"
    )
    assert code == 5
    assert (
        err.splitlines()[-1]
        == f"quantkit: error: {tmp_path}: the disk is full; {partial(tmp_path / 'out')} is kept:"
        " add --resume"
    )


def test_space_is_requested_as_the_prompts_need_it(
    demo_model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 20

    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(total=1 << 30, free=free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    generated(demo_model, prompts, tmp_path / "few")
    free = 60_000
    with pytest.raises(
        NoSpaceError, match=r"too little space on the disk \(found 60 kB free, expected 65\.5 kB"
    ):
        generated(demo_model, prompts, tmp_path / "out")
    free = 1 << 20
    many = written(tmp_path / "many", [{"prompt": "The", "n": 4096, "max_new_tokens": 1000}])
    with pytest.raises(NoSpaceError, match=r"found 1.05 MB free, expected 16\.8 MB"):
        generated(demo_model, many, tmp_path / "out")


def test_a_run_that_fails_before_its_first_line_leaves_nothing(
    demo_model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise QuantkitError("no")

    monkeypatch.setattr("quantkit.jobs.inference.load.load_opened", fails)
    with pytest.raises(QuantkitError):
        generated(demo_model, prompts, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_a_name_that_was_taken_meanwhile_is_left_alone(
    demo_model: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def progress(phase: str, now: int, total: int, unit: str) -> None:
        if phase == "generate":
            out.write_text("precious")

    with pytest.raises(DestinationError, match="appeared while writing; nothing is overwritten"):
        generated(demo_model, prompts, out, progress=progress)
    assert out.read_text() == "precious"
    out.unlink()
    assert generated(demo_model, prompts, out, resume=True).resumed == len(PROMPTS)


# Processes, and terminals


@pytest.mark.slow
def test_processes_share_a_file_of_prompts(demo_model: Path, prompts: Path, tmp_path: Path) -> None:
    """The first one reads and writes; the other may have neither."""
    requested = (
        "generate",
        demo_model,
        "--device",
        "cpu",
        "--dtype",
        "fp32",
        "--max-new-tokens",
        str(NEW),
    )
    alone = forked.python(COMMAND, *requested, "--prompts", prompts, "--output", tmp_path / "one")
    assert alone.returncode == 0, alone.stderr
    code = (
        "import os, sys\n"
        "from quantkit.cli.main import main\n"
        "main([one.replace('@', os.environ['RANK']) for one in sys.argv[1:]])\n"
    )
    os.rename(prompts, tmp_path / "in0")
    first, second = forked.group(
        2, code, *requested, "--prompts", tmp_path / "in@", "--output", tmp_path / "two@"
    )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.startswith(f"{tmp_path / 'two0'}: 6 prompts, ")
    assert (second.stdout, second.stderr) == ("", "")
    assert texts(tmp_path / "two0") == texts(tmp_path / "one")
    assert not (tmp_path / "two1").exists()


@pytest.mark.slow
def test_a_bar_shows_how_far_it_is(demo_model: Path, prompts: Path, tmp_path: Path) -> None:
    code, text = on_terminal(
        "generate", demo_model, "--prompts", prompts, "--output", "out", cwd=tmp_path
    )
    assert code == 0
    assert "/6 prompts" in text
    shown = [line for line in screen(text) if line]
    # The memory to run, which the terminal breaks into two lines, and the result: the bar is gone.
    assert len(shown) == 3
    assert size_text(quantkit.inspect(demo_model).run_bytes) in shown[0]
    assert shown[-1].startswith("out: 6 prompts, ")
