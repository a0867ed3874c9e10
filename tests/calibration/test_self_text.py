"""Calibration samples that the model writes itself."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run
from error_parts import raises
from torch import Tensor

import quantkit
from quantkit.calibration import self_text
from quantkit.calibration.data import Calibration
from quantkit.calibration.self_text import (
    ROUNDS,
    TEMPERATURES,
    Chooser,
    Layout,
    Passage,
    SelfText,
    draw_self_text,
    find_repetitive,
    open_row_writer,
)
from quantkit.calibration.settings import DRAWING, GptqSettings, make_gptq_settings
from quantkit.data.files import DEMO_MODEL, excerpt
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import (
    NonFiniteError,
    RequestError,
    ResumeError,
    UnsupportedError,
)
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.formats.output.destination import MANIFEST
from quantkit.runtime.rows import Choose
from quantkit.text.tokenizer import load_tokenizer
from quantkit.via_transformers.forward import open_to_run

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "calibration": "self",
    "samples": 4,
    "length": 32,
    # So few tokens are worse than none.
    "accept_quality_loss": True,
}
END = 3
TEMPLATE = (
    "{% for one in messages %}[{{ one.role }}]{{ one.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _draw(model: Path = DEMO_MODEL, **changes: Any) -> Calibration:
    source = open_checkpoint(model)
    arguments = {"samples": 6, "length": 48, "seed": 0, "device": CPU, **changes}
    arguments.setdefault("progress", lambda *_: None)
    tokenizer, _ = load_checked_tokenizer(source)
    return draw_self_text(source, tokenizer, **arguments)


def _settings(model: Path, **changes: Any) -> GptqSettings:
    source = open_checkpoint(model)
    arguments: dict[str, Any] = {
        "calibration": "self",
        "text_column": None,
        "samples": 4,
        "length": 32,
        "seed": 0,
        "activation_memory": None,
        "device": CPU,
        **changes,
    }
    return make_gptq_settings(load_checked_tokenizer(source)[0], source, **arguments)


def test_the_seed_decides_the_samples() -> None:
    first, again, other = _draw(), _draw(), _draw(seed=1)
    assert first.tokens.shape == (6, 48)
    assert first.tokens.equal(again.tokens)
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    # The tokenizer puts BOS before a text, and only there.
    assert first.tokens[:, 0].eq(load_tokenizer(DEMO_MODEL).bos_id).all()
    assert len({tuple(row) for row in first.tokens.tolist()}) == 6


def test_a_model_writes_what_it_predicts() -> None:
    source = open_checkpoint(DEMO_MODEL)
    tokens = _draw(samples=6, length=64).tokens
    model = oracle.ours(source)
    log_probs = model(tokens).log_softmax(-1)[:, :-1]
    losses = -log_probs.gather(-1, tokens[:, 1:, None]).mean((1, 2))
    uniform = torch.tensor(float(source.config.vocab_size)).log()
    # Rows at higher temperatures are less likely, and all are far from random.
    by_temperature = losses.view(-1, len(TEMPERATURES)).mean(0).tolist()
    assert by_temperature == sorted(by_temperature)
    assert by_temperature[0] < 0.6 * uniform


def test_the_record_tells_what_was_drawn() -> None:
    drawn = _draw()
    assert drawn.to_json() == {
        "sha256": hashlib.sha256(drawn.tokens.numpy().tobytes()).hexdigest(),
        "samples": 6,
        "length": 48,
        "seed": 0,
        "source": "self",
        "temperatures": list(TEMPERATURES),
        "conversations": False,
        "dropped": 0,
        "dropped_kinds": {},
    }


# What rows consist of


def _scripted(layout: Layout, drawn: Sequence[int], vocabulary: int = 32) -> list[int]:
    """A row of a model that is certain of each of its next tokens."""
    refused = torch.zeros(vocabulary, dtype=torch.bool)
    chooser = Chooser([(0, layout)], len(drawn), 0, refused)
    row = []
    for token in drawn:
        logits = torch.full((1, vocabulary), -1000.0)
        logits[0, token] = 1000.0
        # The second likeliest, for where the likeliest is refused.
        logits[0, 31] = 0.0
        row.append(int(chooser.choose(logits)))
    return row


def test_texts_follow_each_other_with_their_end_and_start() -> None:
    layout = Layout((1,), (Passage(frozenset({END}), keeps_end=True), (1,)))
    assert _scripted(layout, [0, 5, 6, END, 0, 7, END, 0]) == [1, 5, 6, END, 1, 7, END, 1]


def test_no_text_is_empty() -> None:
    layout = Layout((1,), (Passage(frozenset({END}), keeps_end=True), (1,)))
    assert _scripted(layout, [0, END, END, 0]) == [1, 31, END, 1]


def test_the_template_takes_the_place_of_end_tokens() -> None:
    question = Passage(frozenset({END, 20}), keeps_end=False, longest=3)
    answer = Passage(frozenset({END}), keeps_end=False)
    layout = Layout((1,), ((10, 11), question, (20, 21), answer, (END, 22)))
    drawn = [0, 0, 0, 5, 20, 0, 6, END, 0, 0, 0, 7, 7, 7, 7, 0, 8]
    expected = [1, 10, 11, 5, 20, 21, 6, END, 22, 10, 11, 7, 7, 7, 20, 21, 8]
    assert _scripted(layout, drawn) == expected


def test_a_row_without_a_start_begins_with_any_token() -> None:
    layout = Layout((), (Passage(frozenset(), keeps_end=True),))
    firsts = []
    for number in range(40):
        chooser = Chooser([(number, layout)], 1, 0, torch.arange(8) >= 6)
        firsts.append(int(chooser.choose(torch.zeros(1, 8))))
    assert set(firsts) == set(range(6))


def test_rows_do_not_depend_on_the_rows_beside_them() -> None:
    layout = Layout((1,), (Passage(frozenset(), keeps_end=True),))
    logits = torch.randn(1, 64)
    refused = torch.zeros(64, dtype=torch.bool)

    def write(numbers: Sequence[int]) -> dict[int, list[int]]:
        chooser = Chooser([(number, layout) for number in numbers], 8, 0, refused)
        columns = [chooser.choose(logits.expand(len(numbers), -1)) for _ in range(8)]
        return dict(zip(numbers, torch.stack(columns, 1).tolist(), strict=True))

    assert write([2, 5])[5] == write([5])[5] == write(range(8))[5]


def test_logits_that_are_no_numbers_are_an_error() -> None:
    layout = Layout((), (Passage(frozenset(), keeps_end=True),))
    chooser = Chooser([(0, layout)], 2, 0, torch.zeros(8, dtype=torch.bool))
    with pytest.raises(NonFiniteError):
        chooser.choose(torch.full((1, 8), torch.nan))


# Conversations


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, in a folder of Hugging Face's with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    quantkit.convert(DEMO_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_half_of_the_rows_are_conversations_where_there_is_a_template(chat_model: Path) -> None:
    drawn = _draw(chat_model, samples=12)
    assert drawn.to_json()["conversations"] is True
    tokenizer = load_tokenizer(chat_model)
    texts = [tokenizer.decode(row) for row in drawn.tokens.tolist()]
    conversations = [text for text in texts if "[user]" in text]
    assert len(conversations) == 6
    assert all("[assistant]" in text for text in conversations)


def test_a_template_that_does_not_spell_messages_is_left_out_with_a_note(
    chat_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(chat_model, model)
    (model / "chat_template.jinja").write_text(TEMPLATE.replace("one.content", "'x'"))
    drawn = _draw(model)
    assert drawn.to_json()["conversations"] is False
    assert len(drawn.notes) == 1


# Rows that repeat themselves


def test_rows_that_repeat_themselves_are_found() -> None:
    text = load_tokenizer(DEMO_MODEL).encode(excerpt())
    natural = torch.tensor(text[: 128 * (len(text) // 128)]).view(-1, 128)
    assert not any(find_repetitive(natural))
    looping = natural[0].clone()
    looping[64:] = torch.tensor([5, 6, 7, 8]).repeat(16)
    assert find_repetitive(torch.stack([looping, natural[1]])) == [True, False]
    assert find_repetitive(torch.zeros(2, 8)) == [False, False]


class _Writer:
    """Writes the same token in rows at chosen places, in the order in which rows are written, and
    random ones in the others.
    """

    def __init__(self, loops: Callable[[int], bool]) -> None:
        self._loops = loops
        self.written = 0

    def write_rows(self, first: Tensor, length: int, choose: Choose) -> Tensor:
        columns = [first]
        numbers = range(self.written, self.written + len(first))
        for position in range(length - 1):
            logits = torch.zeros(len(first), 2048)
            for row, number in enumerate(numbers):
                token = 9 if self._loops(number) else 10 + (37 * position + number) % 2000
                logits[row, token] = 1000.0
            columns.append(choose(logits))
        self.written += len(first)
        return torch.stack(columns, 1)


def _let_write(monkeypatch: pytest.MonkeyPatch, loops: Callable[[int], bool]) -> _Writer:
    writer = _Writer(loops)
    monkeypatch.setattr(self_text, "open_row_writer", lambda *_: nullcontext(writer))
    return writer


def test_rows_that_repeat_themselves_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = _let_write(monkeypatch, lambda number: number < 2)
    drawn = _draw()
    assert drawn.tokens.shape == (6, 48)
    assert writer.written == 8
    assert drawn.to_json()["dropped_kinds"] == {"repetitive": 2}
    assert len(drawn.notes) == 1


def test_fewer_samples_are_kept_of_a_model_that_often_repeats_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _let_write(monkeypatch, lambda number: number >= 3)
    drawn = _draw()
    assert len(drawn.tokens) == 3
    assert drawn.to_json()["dropped"] == 3 * ROUNDS
    assert len(drawn.notes) == 2


def test_a_model_that_only_repeats_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = _let_write(monkeypatch, lambda _: True)
    with raises(RequestError, path=DEMO_MODEL, options=["calibration"]):
        _draw()
    assert writer.written == 6 * ROUNDS


# Jobs


def test_the_same_command_writes_the_same_bytes_and_records_the_samples(
    demo_model: Path, tmp_path: Path
) -> None:
    results = []
    for name in ("first", "second"):
        results.append(quantkit.quantize(demo_model, tmp_path / name, "int4-g32", **SMALL))
    entry = results[0].manifest["calibration"]
    assert entry == _settings(demo_model).draw(open_checkpoint(demo_model)).to_json()
    assert results[0].manifest["computed_by"]["calibration samples"] == entry["sha256"]
    for file in sorted((tmp_path / "first").iterdir()):
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes()
    other = quantkit.quantize(demo_model, tmp_path / "third", "int4-g32", seed=1, **SMALL)
    assert other.manifest["calibration"]["sha256"] != entry["sha256"]
    again = quantkit.quantize(demo_model, tmp_path / "first", "int4-g32", if_exists="skip", **SMALL)
    assert again.skipped


def test_an_interrupted_job_continues_with_the_same_samples(
    demo_model: Path, tmp_path: Path
) -> None:
    class Interrupted(Exception):
        pass

    def stop(phase: str, done: int, total: int, unit: str) -> None:
        if phase == "quantize" and done > total // 2:
            raise Interrupted

    whole = quantkit.quantize(demo_model, tmp_path / "whole", "int4-g32", **SMALL)
    dst = tmp_path / "resumed"
    with pytest.raises(Interrupted):
        quantkit.quantize(demo_model, dst, "int4-g32", progress=stop, **SMALL)
    with pytest.raises(ResumeError):
        quantkit.quantize(demo_model, dst, "int4-g32", resume=True, seed=1, **SMALL)
    resumed = quantkit.quantize(demo_model, dst, "int4-g32", resume=True, **SMALL)
    assert resumed.manifest == whole.manifest
    assert (dst / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


def test_the_draw_is_a_phase_that_the_plan_has(demo_model: Path, tmp_path: Path) -> None:
    reports = []

    def record(phase: str, done: int, total: int, unit: str) -> None:
        if phase == DRAWING:
            reports.append((done, total, unit))

    _settings(demo_model).draw(open_checkpoint(demo_model), progress=record)
    assert reports[-1] == (4 * 32, 4 * 32, "tokens")
    assert len(reports) >= 31
    plan = quantkit.plan.quantize(demo_model, tmp_path / "out", "int4-g32", **SMALL)
    assert next(iter(plan.steps)) == DRAWING
    assert plan.steps[DRAWING] > 0


def test_the_first_process_writes_for_all(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_checkpoint(demo_model)
    drawn = _settings(demo_model).draw(source)
    sent: list[Any] = []

    def broadcast(_: ProcessGroup, value: Any) -> Any:
        sent.append(value)
        return drawn

    monkeypatch.setattr(ProcessGroup, "broadcast_from_rank0", broadcast)
    assert _settings(demo_model).draw(source, group=ProcessGroup(rank=1, size=2)) is drawn
    assert sent == [None]


def test_refine_trains_on_text_of_the_float_model(demo_model: Path, tmp_path: Path) -> None:
    quantized = tmp_path / "quantized"
    quantkit.quantize(demo_model, quantized, "int4-g128", method="rtn", accept_quality_loss=True)
    options: dict[str, Any] = {**SMALL, "samples": 8, "epochs": 1}
    refined = quantkit.refine(quantized, tmp_path / "refined", against=demo_model, **options)
    entry = json.loads((refined.path / MANIFEST).read_text())["refined"]["calibration"]
    assert entry == _settings(demo_model, samples=8).draw(open_checkpoint(demo_model)).to_json()
    plan = quantkit.plan.refine(quantized, tmp_path / "other", against=demo_model, **options)
    assert plan.steps[DRAWING] > 0


def test_a_model_without_a_tokenizer_writes_tokens(tmp_path: Path) -> None:
    source = oracle.save(oracle.make("llama"), tmp_path / "source")
    result = quantkit.quantize(source, tmp_path / "out", "int4-g32", **SMALL)
    assert result.manifest["calibration"]["source"] == "self"
    assert result.method == "gptq"


def test_a_file_of_this_name_is_given_by_its_path(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("self").write_text(excerpt())
    source = open_checkpoint(demo_model)
    for text in ("./self", Path("self")):
        drawn = _settings(demo_model, calibration=text).draw(source)
        assert drawn.source is None
        assert drawn.sha256 == hashlib.sha256(Path("self").read_bytes()).hexdigest()
    assert _settings(demo_model).draw(source).source == "self"
    card = quantkit.quantize(demo_model, "out", "int4-g32", **{**SMALL, "calibration": "./self"})
    assert "--calibration ./self" in (card.path / "README.md").read_text()


def test_the_command_takes_the_word(demo_model: Path, tmp_path: Path, capfd: Capture) -> None:
    arguments = [
        "--scheme",
        "int4-g32",
        "--calibration",
        "self",
        "--samples",
        "4",
        "--length",
        "32",
    ]
    code, _, _ = run(
        capfd, "quantize", demo_model, tmp_path / "out", "--accept-quality-loss", *arguments
    )
    assert code == 0
    assert json.loads((tmp_path / "out" / MANIFEST).read_text())["calibration"]["source"] == "self"


# What is refused


def test_text_of_the_model_has_no_columns(demo_model: Path, tmp_path: Path) -> None:
    with raises(RequestError, options=["text_column"]):
        quantkit.quantize(demo_model, tmp_path / "out", "int4-g32", text_column="text", **SMALL)


def test_a_model_that_nothing_runs_is_refused(tmp_path: Path) -> None:
    source = oracle.save(oracle.make("llama"), tmp_path / "source")
    oracle.edit_json(source / "config.json", model_type="odd", architectures=["OddForCausalLM"])
    with raises(RequestError, path=source):
        quantkit.quantize(source, tmp_path / "out", "int4-g32", tensors_only=True, **SMALL)
    checkpoint = open_checkpoint(source, tensors_only=True)
    with pytest.raises(UnsupportedError):
        draw_self_text(
            checkpoint, None, samples=4, length=32, seed=0, device=CPU, progress=lambda *_: None
        )


def test_a_model_that_does_not_fit_in_memory_is_refused(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.model.device.available_bytes", lambda: 10**6)
    with raises(RequestError, path=demo_model):
        _draw(demo_model)
    with raises(RequestError, path=demo_model):
        _settings(demo_model).require_text(open_checkpoint(demo_model))


# Models that transformers runs


def test_transformers_writes_rows_with_its_cache(hybrid: Path) -> None:
    """Each token is chosen from the logits that the model has without a cache."""
    source = open_to_run(hybrid)
    choices: list[Tensor] = []
    logits_of_choices: list[Tensor] = []

    def choose(logits: Tensor) -> Tensor:
        logits_of_choices.append(logits)
        choices.append(torch.arange(len(logits)) * 7 + 3 * len(choices) + 5)
        return choices[-1]

    with open_row_writer(source, CPU) as writer:
        rows = writer.write_rows(torch.tensor([4, 9]), 12, choose)
    assert rows[:, 0].tolist() == [4, 9]
    assert rows[:, 1:].equal(torch.stack(choices, 1))
    with torch.no_grad():
        expected = oracle.load(hybrid)(rows).logits[:, :-1]
    torch.testing.assert_close(torch.stack(logits_of_choices, 1), expected, rtol=1e-3, atol=1e-3)


def test_a_model_that_transformers_runs_writes_its_samples(hybrid: Path, tmp_path: Path) -> None:
    result = quantkit.quantize(hybrid, tmp_path / "out", "int4-g32", source_check=False, **SMALL)
    entry = result.manifest["calibration"]
    assert entry["source"] == "self"
    source = open_to_run(hybrid)
    text = SelfText.of(source, load_checked_tokenizer(source)[0], 32)
    assert not text.has_conversations


def test_a_model_that_transformers_does_not_generate_with_is_refused(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_to_run(hybrid)
    with open_row_writer(source, CPU) as writer:
        model: Any = writer
        monkeypatch.setattr(model._lazy.model, "can_generate", lambda: False, raising=False)
        with raises(UnsupportedError, path=hybrid):
            writer.write_rows(torch.tensor([4]), 4, lambda logits: logits.argmax(-1))
