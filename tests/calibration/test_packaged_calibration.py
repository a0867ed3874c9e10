"""Calibration on the text that ships with the package: what is drawn of it, and what is dropped."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run
from error_parts import raises
from torch import Tensor

import quantkit
from quantkit.calibration import packaged
from quantkit.calibration.packaged import PREFIX, PackagedText, measure_losses_of_source
from quantkit.cli.main import main
from quantkit.data.files import DEMO_MODEL, excerpt
from quantkit.errors import RequestError
from quantkit.formats.detect import open_checkpoint
from quantkit.jobs.plan import Estimate
from quantkit.jobs.quantize.options import QuantizeOptions
from quantkit.jobs.quantize.settings import gptq_settings
from quantkit.tensors.scheme import QuantScheme
from quantkit.text.chat import TemplateChat
from quantkit.text.chat_template import ChatTemplate
from quantkit.text.tokenizer import load_tokenizer

KINDS = {"first": (40, "abcdef"), "second": (20, "ghijkl"), "third": (20, "mnopqr")}
"""How many documents of each kind, and the letters that they are of."""
GPTQ: dict[str, Any] = {"samples": 6, "length": 48}
RUSSIAN = "Снег шёл всю ночь, деревья стояли белые и тихие. "


class Letters:
    """A token for each letter, led by a BOS of 0."""

    bos_id = 0
    vocab_size = 0x500
    special_tokens: Mapping[str, int] = {}

    def encode(self, text: str, *, specials: bool = False, bos: bool = True) -> list[int]:
        return [0] * bos + [ord(letter) for letter in text]


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small text in place of the packaged one."""
    path = tmp_path / "calibration.jsonl"
    lines = [
        {"kind": kind, "text": letters * 25}
        for kind, (count, letters) in KINDS.items()
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(packaged, "CALIBRATION", path)
    return path


def _of(
    seed: int = 0, chat: Any = None, tokenizer: Any = None, wanted: int = 10**9
) -> PackagedText:
    return PackagedText.of(tokenizer or Letters(), chat, seed=seed, token_count=wanted)


def _draw(text: PackagedText, samples: int, length: int, dropped: str = "", seed: int = 0) -> Any:
    def measure_losses(prefixes: Sequence[Tensor]) -> list[float]:
        return [float(chr(int(prefix[1])) in dropped) for prefix in prefixes]

    return text.draw(samples=samples, length=length, seed=seed, measure_losses=measure_losses)


class Losses:
    """Losses of prefixes by the kind that their letters are of, and the prefixes that were
    tried.
    """

    def __init__(self, **losses: float) -> None:
        self._losses = losses
        self.tried: list[tuple[str, int]] = []

    def __call__(self, prefixes: Sequence[Tensor]) -> list[float]:
        found = []
        for prefix in prefixes:
            letter = chr(int(prefix[1]))
            kind = next(kind for kind, (_, letters) in KINDS.items() if letter in letters)
            self.tried.append((kind, len(prefix)))
            found.append(self._losses.get(kind, 0.1))
        return found


def _shares(tokens: Tensor) -> dict[str, float]:
    counts = Counter(tokens.flatten().tolist())
    own = {
        kind: sum(counts[ord(letter)] for letter in letters) for kind, (_, letters) in KINDS.items()
    }
    return {kind: count / sum(own.values()) for kind, count in own.items()}


@pytest.mark.parametrize(("samples", "length"), [(64, 33), (8, 129), (5, 17), (2, 300)])
def test_few_samples_and_short_ones_hold_every_kind_in_proportion(
    documents: Path, samples: int, length: int
) -> None:
    drawn = _draw(_of(), samples, length)
    assert drawn.tokens.shape == (samples, length)
    assert drawn.tokens[:, 0].eq(0).all()
    assert not drawn.tokens[:, 1:].eq(0).any()
    assert _shares(drawn.tokens) == pytest.approx(
        {"first": 0.5, "second": 0.25, "third": 0.25}, abs=0.03
    )


def test_the_text_and_the_seed_decide_the_samples() -> None:
    tokenizer = load_tokenizer(DEMO_MODEL)
    drawn = [
        _draw(_of(seed, tokenizer=tokenizer, wanted=8 * 64), 8, 64, seed=seed) for seed in (0, 0, 1)
    ]
    assert drawn[0].tokens.equal(drawn[1].tokens)
    assert drawn[0].fingerprint() == drawn[1].fingerprint() != drawn[2].fingerprint()
    assert drawn[0].sha256 == drawn[2].sha256
    assert drawn[0].to_json()["source"] == "packaged"


def test_what_the_source_does_not_predict_is_dropped_and_replaced(documents: Path) -> None:
    drawn = _draw(_of(), 32, 33, dropped=KINDS["third"][1])
    assert drawn.tokens.shape == (32, 33)
    assert dict(drawn.dropped) == {"third": 8}
    assert _shares(drawn.tokens)["third"] == 0
    assert drawn.to_json() | {"sha256": ""} == {
        "sha256": "",
        "samples": 32,
        "length": 33,
        "seed": 0,
        "source": "packaged",
        "dropped": 8,
        "dropped_kinds": {"third": 8},
    }
    assert any("third 8" in note for note in drawn.notes)


def test_as_many_samples_are_drawn_as_were_requested_or_a_note_says_how_many(
    documents: Path,
) -> None:
    def scripted(*rounds: Sequence[int], then: int) -> Any:
        verdicts = iter(rounds)

        def measure_losses(prefixes: Sequence[Tensor]) -> list[float]:
            # All kinds are doubtful, so that each round tries all of its pieces.
            if len(prefixes[0]) == 32:
                return [0.8] * len(prefixes)
            return list(map(float, next(verdicts, [then] * len(prefixes))))

        return measure_losses

    halves = [1, 1, 0, 0, 1, 0, 0, 0]  # of the first two kinds
    drawn = _of().draw(
        samples=8,
        length=33,
        seed=0,
        measure_losses=scripted(halves, [0, 1, 0, 1], [0, 0, 1], then=0),
    )
    assert len(drawn.tokens) == 8
    assert not any("not 8" in note for note in drawn.notes)
    drawn = _of().draw(samples=8, length=33, seed=0, measure_losses=scripted(halves, then=1))
    assert len(drawn.tokens) == 5
    assert any("5" in note and "not 8" in note for note in drawn.notes)


def test_of_a_kind_that_is_clearly_predicted_two_short_pieces_are_tried(documents: Path) -> None:
    losses = Losses(second=0.6)
    drawn = _of().draw(samples=32, length=129, seed=0, measure_losses=losses)
    assert Counter(losses.tried) == {(kind, 32): 2 for kind in KINDS}
    everything = _of().draw(
        samples=32, length=129, seed=0, measure_losses=Losses(first=0.8, second=0.8, third=0.8)
    )
    assert drawn.tokens.equal(everything.tokens)
    assert drawn.dropped == everything.dropped == {}


def test_of_a_doubtful_kind_all_pieces_are_tried(documents: Path) -> None:
    losses = Losses(second=0.7)
    drawn = _of().draw(samples=32, length=129, seed=0, measure_losses=losses)
    assert Counter(losses.tried) == {
        **{(kind, 32): 2 for kind in KINDS},
        ("second", PREFIX): 8,
    }
    assert drawn.dropped == {}


def test_all_pieces_are_tried_once_one_is_predicted_nearly_uniformly(documents: Path) -> None:
    losses = Losses(third=0.9)
    drawn = _of().draw(samples=32, length=129, seed=0, measure_losses=losses)
    assert Counter(losses.tried) == {
        **{(kind, 32): 2 for kind in KINDS},
        ("first", PREFIX): 16 + 5,
        ("second", PREFIX): 8 + 3,
        # The rest of a sample, which is shorter.
        ("first", 43): 1,
        ("third", PREFIX): 8,
    }
    assert drawn.dropped == {"third": 8}


def test_all_pieces_of_kinds_with_several_languages_are_tried(
    documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged, "_MIXED_KINDS", ("second",))
    losses = Losses()
    _of().draw(samples=32, length=129, seed=0, measure_losses=losses)
    assert Counter(losses.tried) == {("first", 32): 2, ("second", 32): 8, ("third", 32): 2}


@pytest.mark.parametrize("kind", ["languages", "dialogue-languages", "code"])
def test_the_text_has_the_kinds_with_several_languages(kind: str) -> None:
    assert kind in {one.name for one in _of(tokenizer=load_tokenizer(DEMO_MODEL)).kinds}


def test_where_nothing_is_predicted_nothing_is_dropped(documents: Path) -> None:
    drawn = _draw(_of(), 32, 33, dropped="abcdefghijklmnopqr\n")
    assert (len(drawn.tokens), drawn.to_json()["dropped"]) == (32, 0)
    assert drawn.notes


def test_no_more_is_drawn_than_the_text_is_good_for(documents: Path) -> None:
    most = 2 * sum(len(kind.tokens) for kind in _of().kinds) // 100
    assert len(_draw(_of(), most, 100).tokens) == most
    with raises(RequestError, expected=f"at most {most}", options=["calibration", "samples"]):
        _of().require(most + 1, 100)


def test_no_more_of_the_text_is_tokenized_than_the_samples_can_be_spread_over(
    documents: Path,
) -> None:
    counts = [
        sum(len(kind.tokens) for kind in _of(wanted=wanted).kinds) for wanted in (300, 1000, 10**6)
    ]
    assert 4 * 300 < counts[0] < 2000 < 4 * 1000 < counts[1] < 5000 < counts[2]
    assert len(_draw(_of(wanted=300), 3, 100).tokens) == 3


@pytest.mark.parametrize("ids", [[], [3], [3, 4]])
def test_a_tokenizer_that_makes_nothing_of_it_is_reported(ids: list[int], documents: Path) -> None:
    class Poor(Letters):
        def encode(self, text: str, *, specials: bool = False, bos: bool = True) -> list[int]:
            return ids

    with raises(RequestError, expected="16 distinct tokens", options=["calibration", "method"]):
        _of(tokenizer=Poor())


DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because."},
]
TURNS = (
    "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}{% if"
    " add_generation_prompt %}?{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TURNS, "<system>Be brief.<user>Why?<assistant>Because."),
        (NO_SYSTEM + TURNS, "<user>Why?<assistant>Because."),
        ("{{ raise_exception('none') }}", None),
        (None, "System: Be brief.\n\nUser: Why?\n\nAssistant: Because.\n\n"),
    ],
)
def test_dialogues_go_through_the_models_template(
    template: str | None, expected: str | None, documents: Path
) -> None:
    documents.write_text(
        documents.read_text() + json.dumps({"kind": "dialogue", "messages": DIALOGUE}) + "\n"
    )
    chat = None if template is None else TemplateChat(lambda _: ChatTemplate(template), Letters())  # type: ignore[arg-type]
    text = _of(chat=chat)
    found = [
        "".join(map(chr, kind.tokens.tolist())) for kind in text.kinds if kind.name == "dialogue"
    ]
    assert found == ([] if expected is None else [expected])
    assert bool(text.notes) == (expected is None)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "too long",
        ),
        (
            "{% for i in range(5000) %}{{ messages[0].content * 40 }}{% endfor %}",
            "too long",
        ),
        ("", "40 .*drops"),
        ("hello", "40 .*drops"),
    ],
)
def test_a_template_that_reports_no_dialogue_is_reported_and_ends(
    template: str, words: str, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = json.dumps({"kind": "dialogue", "messages": DIALOGUE[1:]}) + "\n"
    documents.write_text(documents.read_text() + turns * 40)
    monkeypatch.setattr(packaged, "TEMPLATE_SECONDS", 1.0)
    monkeypatch.setattr(packaged, "TEMPLATE_LENGTH", 1 << 17)
    text = _of(chat=TemplateChat(lambda _: ChatTemplate(template), Letters()))  # type: ignore[arg-type]
    assert re.search(words, " ".join(text.notes))


def test_dialogues_are_the_same_at_all_times(documents: Path) -> None:
    documents.write_text(
        documents.read_text() + json.dumps({"kind": "dialogue", "messages": DIALOGUE}) + "\n"
    )
    template = TURNS + "{{ strftime_now('%d %b %Y %f') }} {{ range(1000) | random }}"
    texts = [_of(chat=TemplateChat(lambda _: ChatTemplate(template), Letters())) for _ in range(2)]  # type: ignore[arg-type]
    assert texts[0].kinds[-1].tokens.equal(texts[1].kinds[-1].tokens)
    assert "26 Jul 2024 000000" in "".join(map(chr, texts[0].kinds[-1].tokens.tolist()))


def test_a_source_reports_what_it_predicts_from_what_it_does_not(tmp_path: Path) -> None:
    """A model that knows what follows each of the first 32 tokens, and nothing of the others."""
    model = oracle.make("llama", vocab_size=64, hidden_size=64, num_hidden_layers=1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        rows = torch.eye(64)[:32]
        model.model.embed_tokens.weight.copy_(torch.cat([rows, torch.zeros(32, 64)]))
        model.lm_head.weight.copy_(torch.cat([rows.roll(1, 0), torch.zeros(32, 64)]))
    source = open_checkpoint(oracle.save(model, tmp_path / "model"))
    line = torch.arange(80)
    known, unknown = line % 32, 32 + line % 32
    prefixes = [known, unknown, known[:20], unknown[:20], unknown[:5]]
    losses = measure_losses_of_source(source, prefixes, 64)
    assert losses[0] < 0.1
    assert losses[1] == pytest.approx(1, abs=0.01)
    assert losses[2] < 0.1
    assert losses[3] == pytest.approx(1, abs=0.01)
    assert losses[4] == 0


# The default


INT4, INT8 = QuantScheme(4, 64), QuantScheme(8, None)


@pytest.mark.parametrize(
    ("method", "schemes", "solved"),
    [
        (None, [INT4], True),
        (None, [INT8], False),
        (None, [INT8, INT8, INT4], True),
        ("rtn", [INT4], False),
        ("gptq", [INT8], True),
    ],
)
def test_int4_is_solved_and_int8_rounded_unless_said(
    method: Any, schemes: Sequence[QuantScheme], solved: bool, demo_model: Path
) -> None:
    source, tokenizer = open_checkpoint(demo_model), load_tokenizer(demo_model)
    options = QuantizeOptions(demo_model, "out", "int8", method=method)
    assert (gptq_settings(options, schemes, source, tokenizer) is not None) == solved


def test_rows_that_no_group_divides_are_rounded(tmp_path: Path) -> None:
    source = oracle.save(
        oracle.make("llama", hidden_size=72, intermediate_size=72, head_dim=18), tmp_path / "source"
    )
    made = quantkit.quantize(
        source, tmp_path / "out", "int4-g64", source_check=False, accept_quality_loss=True
    )
    assert (made.schemes.keys(), made.method, made.calibration) == ({"int8": 1}.keys(), "rtn", None)


@pytest.mark.parametrize("job", [["quantize"], ["plan", "quantize"]])
@pytest.mark.parametrize("lack", ["tokenizer", "config"])
def test_int4_without_what_calibration_needs_names_rounding(
    job: list[str], lack: str, tmp_path: Path, capfd: Capture
) -> None:
    source = oracle.save(oracle.make("llama"), tmp_path / "source")
    options = ["--scheme", "int4-g32"]
    if lack == "config":
        oracle.edit_json(source / "config.json", model_type="odd", architectures=["OddForCausalLM"])
        options.append("--tensors-only")
    code, _, err = run(capfd, *job, source, tmp_path / "out", *options)
    assert code == 2
    assert "--method rtn" in err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def languages(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """English, which the demo model has learnt, and Russian, of which it has seen nothing."""
    path = tmp_path_factory.mktemp("text") / "calibration.jsonl"
    lines = [
        {"kind": "english", "text": excerpt()[:8000]},
        {"kind": "russian", "text": RUSSIAN * 60},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(packaged, "CALIBRATION", path)


@pytest.mark.slow
@pytest.mark.usefixtures("languages")
def test_int4_is_calibrated_on_what_the_source_knows_and_goes_on_with_it(
    demo_model: Path, tmp_path: Path
) -> None:
    made = quantkit.quantize(demo_model, tmp_path / "out", "int4-g64", **GPTQ)
    record = made.manifest["calibration"]
    assert (made.method, made.manifest["method"], record["source"]) == ("gptq", "gptq", "packaged")
    assert (record["samples"], record["dropped"] > 0, set(record["dropped_kinds"])) == (
        6,
        True,
        {"russian"},
    )
    readme = (made.path / "README.md").read_text()
    assert f" {record['dropped']} " in readme

    def interrupt(phase: str, done: int, *_: object) -> None:
        if (phase, done) == ("quantize", 14):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantkit.quantize(demo_model, tmp_path / "again", "int4-g64", **GPTQ, progress=interrupt)
    quantkit.quantize(demo_model, tmp_path / "again", "int4-g64", **GPTQ, resume=True)
    names = {path.name for path in made.path.iterdir()}
    assert names == {path.name for path in (tmp_path / "again").iterdir()}
    assert all(
        (made.path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
        for name in names
    )


@pytest.mark.slow
@pytest.mark.usefixtures("languages")
def test_the_command_reports_what_it_takes_before_it_begins(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    options = ["--scheme", "int4-g64", "--samples", "6", "--length", "48", "--json", "-"]
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in ("quantize", demo_model, tmp_path / "out", *options)])
    out, err = capfd.readouterr()
    assert stop.value.code == 0, err
    lines = err.splitlines()
    assert lines[0].startswith("quantkit: note: this takes about memory ")
    assert all(word in lines[0] for word in ("disk", "time"))
    assert json.loads(out)["method"] == "gptq"


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"samples": 10**6},
            {"found": "1000000 samples of 128 tokens", "options": ["calibration", "samples"]},
        ),
        (
            {"samples": 10**7, "calibration": "text.txt"},
            {"found": "10000000 samples of 128 tokens", "options": ["samples"]},
        ),
        ({"length": 10**11}, {"found": "100000000000 tokens", "options": ["length"]}),
        ({"samples": 0}, {"found": "0 of 128"}),
        ({"samples": -3}, {"found": "-3 of 128"}),
        ({"length": 0}, {"found": "128 of 0"}),
        ({"seed": 2**70}, {"argument": "seed", "found": 2**70}),
    ],
    ids=str,
)
def test_numbers_that_make_no_sense_are_refused_before_anything_grows_with_them(
    settings: dict[str, Any], parts: dict[str, Any], demo_model: Path, tmp_path: Path
) -> None:
    def estimated(_: object) -> None:
        pytest.fail("the estimate is made of them")

    dst = tmp_path / "out"
    with raises(RequestError, **parts):
        quantkit.quantize(demo_model, dst, "int4-g64", **settings, on_estimate=estimated)
    with raises(RequestError, **parts):
        quantkit.plan.quantize(demo_model, dst, "int4-g64", **settings)


@pytest.mark.parametrize(
    ("seconds", "reported"), [(0.2, "1 s"), (1.2, "2 s"), (100.0, "2 min"), (130.0, "3 min")]
)
def test_the_time_that_is_reported_is_rounded_up(seconds: float, reported: str) -> None:
    estimate = Estimate({}, 1, "writing", 0, 1, 0, seconds, 0, [], {})
    assert f", time {reported}, disk " in estimate.line()


def test_plan_counts_the_default_method(demo_model: Path, tmp_path: Path) -> None:
    seconds = [
        quantkit.plan.quantize(
            demo_model, tmp_path / "out", "int4-g64", method=method, source_check=False
        )
        for method in (None, "gptq", "rtn")
    ]
    memory = [one.memory_bytes for one in seconds]
    assert math.isclose(memory[0], memory[1], rel_tol=0.05)
    assert seconds[0].seconds > 2 * seconds[2].seconds
