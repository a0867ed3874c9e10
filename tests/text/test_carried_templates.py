"""Chat templates travel with a model: wherever its folder has them, readers of the output find
them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
from command import Capture, run
from error_parts import raises
from jinja2 import TemplateError
from partial import interrupted
from transformers import AutoTokenizer

import quantkit
from quantkit.errors import CheckpointError, RequestError, ResumeError
from quantkit.quality.verify import Verdict, verify
from quantkit.text.chat_template import ChatTemplates
from quantkit.text.tokenizer import load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for one in messages %}[{{ one.role }}] {{ one.content }}\r\n{% endfor"
    " %}größer"
)
TOOLS = "{{ bos_token }}{{ tools | tojson }}{{ messages | map(attribute='content') | join }}"
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": " Yes "},
    {"role": "user", "content": "So"},
]
TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}


def _in_folder(path: Path) -> None:
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)


LIST = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TOOLS}]
FORMS: dict[str, Callable[[Path], Any]] = {
    "file": lambda path: (path / "chat_template.jinja").write_text(TEMPLATE),
    "config": lambda path: oracle.edit_json(path / "tokenizer_config.json", chat_template=TEMPLATE),
    "old file": (
        lambda path: (path / "chat_template.json").write_text(
            json.dumps({"chat_template": TEMPLATE})
        )
    ),
    "list": lambda path: oracle.edit_json(path / "tokenizer_config.json", chat_template=LIST),
    "folder": _in_folder,
}
SEVERAL = ("list", "folder")


@pytest.fixture(scope="module")
def plain(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("templates") / "hf"
    quantkit.convert(demo_model, path, source_check=False)
    return path


@pytest.fixture
def source(plain: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = oracle.copy(plain, tmp_path / "source")
    FORMS[getattr(request, "param", "file")](path)
    return path


def _seen(folder: Path, **options: Any) -> list[int]:
    """What transformers makes of a conversation."""
    found = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        TALK, add_generation_prompt=True, **options
    )
    return list(found["input_ids"])


def _expected(plain: Path, template: str) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(plain)
    tokenizer.chat_template = template
    tools = [TOOL] if template == TOOLS else None
    return list(
        tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tools=tools)["input_ids"]
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("source", FORMS, indirect=True)
@pytest.mark.parametrize("job", ["convert", "quantize", "there and back"])
def test_readers_find_them_wherever_they_lay(
    source: Path, job: str, plain: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    out, several = tmp_path / "out", request.node.callspec.params["source"] in SEVERAL
    if job == "quantize":
        quantkit.quantize(source, out, "int8", source_check=False)
    elif job == "convert":
        quantkit.convert(source, out, source_check=False)
    else:
        quantkit.convert(source, tmp_path / "meta", to="meta", source_check=False)
        assert verify(source, tmp_path / "meta").verdict is Verdict.SAME
        quantkit.convert(tmp_path / "meta", out, source_check=False)
    ours = quantkit.chat_format(out, load_tokenizer(out))
    expected = _expected(plain, TEMPLATE)
    assert _seen(out) == ours.encode(TALK) == expected
    if several:
        assert (
            _seen(out, tools=[TOOL]) == ours.encode(TALK, tools=[TOOL]) == _expected(plain, TOOLS)
        )
        assert not (out / "chat_template.jinja").exists()  # it would hide the others
    else:
        (out / "chat_template.jinja").unlink()  # older readers know the other place only
        assert _seen(out) == expected
    assert not (out / "chat_template.json").exists()
    assert ChatTemplates(out).sources == ChatTemplates(source).sources


def test_a_folder_without_any_is_left_as_it_is(plain: Path, tmp_path: Path) -> None:
    quantkit.convert(plain, tmp_path / "out", source_check=False)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (plain / name).read_bytes()
    assert not ChatTemplates(tmp_path / "out")


def test_the_manifest_knows_the_sources_templates(plain: Path, tmp_path: Path) -> None:
    source = oracle.copy(plain, tmp_path / "source")
    _in_folder(source)
    made = quantkit.convert(source, tmp_path / "out", source_check=False)
    listed = made.manifest["source"]["sha256"]
    assert {"chat_template.jinja", "additional_chat_templates/tool_use.jinja"} <= set(listed)


@pytest.mark.slow
def test_another_or_no_template_is_a_difference(source: Path, plain: Path, tmp_path: Path) -> None:
    changed = oracle.copy(source, tmp_path / "changed")
    (changed / "chat_template.jinja").write_text(TEMPLATE + " ")
    (problem,) = verify(source, changed).problems
    assert "default" in problem
    (problem,) = verify(source, plain).problems
    assert problem.startswith(f"{plain} ")
    assert verify(plain, source).verdict is Verdict.DIFFERENT


def test_a_template_that_changed_is_no_interrupted_run_to_go_on_with(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    interrupted(quantkit.convert, source, out)
    (source / "chat_template.jinja").write_text("another")
    with raises(ResumeError, "chat_template.jinja", "tokenizer_config.json"):
        quantkit.convert(source, out, source_check=False, resume=True)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    quantkit.convert(source, out, source_check=False, resume=True)
    assert ChatTemplates(out).sources == ChatTemplates(source).sources


@pytest.mark.parametrize("place", ["chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_a_template_that_was_added_to_an_output_is_reported(
    place: str, plain: Path, tmp_path: Path
) -> None:
    quantkit.convert(plain, tmp_path / "out", source_check=False)
    (tmp_path / "out" / place).parent.mkdir(exist_ok=True)
    (tmp_path / "out" / place).write_text("{{ 'obey' }}")
    with raises(CheckpointError, path=tmp_path / "out" / place):
        quantkit.verify(tmp_path / "out")


LLAMA2_TALKS = [
    TALK,
    [{"role": "system", "content": "Be brief."}, *TALK],
    [{"role": "system", "content": ""}, {"role": "user", "content": "  blanks \n"}],
    [{"role": "user", "content": "Größe, 日本語 🚀 <s> x </s>"}],
]


@pytest.mark.parametrize("job", ["convert", "quantize"])
def test_a_meta_folder_is_given_llama_2s(
    job: str, demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    scheme = ["--scheme", "int8"] if job == "quantize" else []
    result = run(
        capfd,
        job,
        demo_model,
        tmp_path / "out",
        "--template",
        "llama2",
        "--no-source-check",
        *scheme,
    )
    assert result[0] == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = quantkit.chat_format(demo_model, load_tokenizer(demo_model), "llama2")
    for talk in LLAMA2_TALKS[:3]:
        assert theirs.apply_chat_template(talk)["input_ids"] == ours.encode(talk)
    for talk in ([{"role": "user", "content": "[/INST]"}], [TALK[0], TALK[0]]):
        with pytest.raises(TemplateError):
            theirs.apply_chat_template(talk)
    assert quantkit.verify(demo_model, tmp_path / "out").ok


@pytest.fixture
def llama3(tmp_path: Path) -> Path:
    """A Meta folder with a tokenizer of Llama 3's kind."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"he", b"the", b" the"]
    source = oracle.save(oracle.make("llama", vocab_size=len(tokens) + 256), tmp_path / "floats")
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (source / "tokenizer.model").write_bytes(b"".join(lines))
    quantkit.convert(source, tmp_path / "llama3", to="meta", source_check=False)
    return tmp_path / "llama3"


def test_a_meta_folder_is_given_llama_3s(llama3: Path, tmp_path: Path) -> None:
    quantkit.convert(llama3, tmp_path / "out", template="llama3", source_check=False)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = quantkit.chat_format(llama3, load_tokenizer(llama3), "llama3")
    for talk in LLAMA2_TALKS:
        assert theirs.apply_chat_template(talk, add_generation_prompt=True)[
            "input_ids"
        ] == ours.encode(talk)
    quantkit.convert(tmp_path / "out", tmp_path / "meta", to="meta", source_check=False)
    carried = quantkit.chat_format(tmp_path / "meta", load_tokenizer(tmp_path / "meta"))
    assert carried.encode(TALK) == ours.encode(TALK)  # BOS is spelled by the tokenizer there


def test_a_file_is_taken_for_a_template(source: Path, demo_model: Path, tmp_path: Path) -> None:
    file = source / "chat_template.jinja"
    made = quantkit.convert(demo_model, tmp_path / "out", template=str(file), source_check=False)
    assert ChatTemplates(tmp_path / "out").sources == {"default": TEMPLATE.replace("\r\n", "\n")}
    assert made.manifest["options"]["template"] == "chat_template.jinja"
    ours = quantkit.chat_format(tmp_path / "out", load_tokenizer(tmp_path / "out"), str(file))
    assert ours.encode(TALK) == _seen(tmp_path / "out")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("llama4", "'llama4'"),
        ("llama3", "<|start_header_id|>"),
        ("nowhere.jinja", "nowhere.jinja"),
        ("", "''"),
        (5, "`template`"),
    ],
)
def test_what_is_no_template_is_refused_before_anything_is_written(
    template: Any, name: str, demo_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as caught:
        quantkit.convert(demo_model, tmp_path / "out", template=template)
    # Of a file that does not exist, the path.
    assert name in str(caught.value)
    (tmp_path / "broken.jinja").write_text("{% for %}")
    with raises(CheckpointError, path=tmp_path / "broken.jinja"):
        quantkit.plan.quantize(
            demo_model, tmp_path / "out", "int8", template=str(tmp_path / "broken.jinja")
        )
    assert [path.name for path in tmp_path.iterdir()] == ["broken.jinja"]


def test_a_template_spells_tokens_that_sentencepiece_does_not_read(
    source: Path, tmp_path: Path
) -> None:
    quantkit.convert(source, tmp_path / "meta", to="meta", source_check=False)
    assert (tmp_path / "meta" / "chat_template.jinja").is_file()
    assert (tmp_path / "meta" / "tokenizer.model").is_file()
    with raises(RequestError, path=tmp_path / "meta", options=["template"]):
        quantkit.chat_format(tmp_path / "meta", load_tokenizer(tmp_path / "meta"))
