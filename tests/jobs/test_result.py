"""What `convert` and `quantize` give back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import forked
import pytest

import quantkit
from quantkit.data.files import EXCERPT
from quantkit.formats import manifest
from quantkit.jobs.output.sizes import WeightSizes


def test_convert_says_what_it_wrote(demo_model: Path, tmp_path: Path) -> None:
    made = quantkit.convert(demo_model, tmp_path / "out", dtype="fp32")
    assert made.path == tmp_path / "out"
    assert made.bits_per_weight == 32
    assert made.weight_bytes == quantkit.inspect(tmp_path / "out").weight_bytes
    assert made.manifest == manifest.read(tmp_path / "out")
    assert made.notes == []
    assert json.loads(json.dumps(made.to_json()))["path"] == str(tmp_path / "out")


@pytest.mark.slow
def test_quantize_says_what_it_wrote_and_how_good_it_is(demo_model: Path, tmp_path: Path) -> None:
    made = quantkit.quantize(
        demo_model, tmp_path / "out", scheme="int4-g64", method="rtn", keep=["*.layers.0.mlp.*"]
    )
    found = quantkit.inspect(tmp_path / "out")
    assert (made.weight_bytes, made.bits_per_weight) == (found.weight_bytes, found.bits_per_weight)
    assert (made.schemes, made.method, made.calibration) == ({"int4-g64": 25}, "rtn", None)
    assert made.quality.problem() is None
    assert made.effort is None
    value = json.loads(json.dumps(made.to_json()))
    assert (
        value["quality"] == made.manifest["quality"] == manifest.read(tmp_path / "out")["quality"]
    )
    assert set(value) == set(vars(made))


@pytest.mark.slow
def test_the_line_holds_the_mean_of_all_texts(demo_model: Path, tmp_path: Path) -> None:
    made = quantkit.quantize(demo_model, tmp_path / "out", "int4-g64", method="rtn")
    short, long = (
        replace(
            made.quality.texts[0],
            tokens=tokens,
            kl=kl,
            source_perplexity=10.0,
            perplexity=perplexity,
        )
        for tokens, kl, perplexity in ((100, 0.01, 10.0), (300, 0.03, 10.4))
    )
    sizes = WeightSizes(600_000_000, 312_400_000, 10_000_000, None)
    made = replace(
        made, quality=replace(made.quality, texts=[short, long]), seconds=3723.4, weights=sizes
    )
    (line,) = made.lines()
    size = "312 MB, smaller than the source's 600 MB, 8.96 bits a weight"
    assert line.startswith(f"wrote {tmp_path / 'out'}: int4-g64, {size}, KL 0.025")
    assert "perplexity +3" in line
    assert line.endswith(", 1 h 02 min")


@pytest.mark.parametrize(
    ("seconds", "reported"),
    [(0.4123, "0.41 s"), (41.2, "41 s"), (59.9, "60 s"), (125.0, "2 min 05 s")],
)
def test_times_have_no_more_digits_than_one_reads(
    seconds: float, reported: str, demo_model: Path, tmp_path: Path
) -> None:
    made = quantkit.convert(demo_model, tmp_path / "out")
    assert replace(made, seconds=seconds).lines()[0].endswith(f", {reported}")


@pytest.mark.slow
def test_each_process_of_a_group_gets_the_result_of_the_first(
    demo_model: Path, tmp_path: Path
) -> None:
    code = (
        "import sys, quantkit\nfrom quantkit.cli.processes import join_group\nsrc, dst, text ="
        " sys.argv[1:]\nwith join_group(device='cpu') as group:\n    made = quantkit.quantize(src,"
        " dst, 'int4-g64', method='gptq', calibration=text, samples=2, length=32,\n                "
        "             accept_quality_loss=True, group=group)\n    print(made.path,"
        " made.quality.texts[0].kl, made.seconds)\n"
    )
    first, second = forked.group(2, code, demo_model, tmp_path / "out", EXCERPT)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.startswith(f"{tmp_path / 'out'} 0.")
    assert second.stdout == first.stdout


@pytest.mark.slow
def test_where_the_first_process_fails_the_others_exit_as_it_does(
    demo_model: Path, tmp_path: Path
) -> None:
    """Here after the gate, while the others wait for its result."""
    code = (
        "import quantkit.jobs.quantize.verification as job\n"
        "from quantkit.cli.main import main\n"
        "from quantkit.errors import QualityError\n"
        "def fail(*_):\n"
        "    raise QualityError('too far')\n"
        "job.require_passed = fail\n"
        "main()\n"
    )
    options = [
        "--scheme",
        "int4-g64",
        "--method",
        "gptq",
        "--calibration",
        EXCERPT,
        "--samples=2",
        "--length=32",
    ]
    both = forked.group(2, code, "quantize", demo_model, tmp_path / "out", *options)
    assert [one.returncode for one in both] == [8, 8], both[1].stderr
    assert [one.stdout for one in both] == ["", ""]
    assert sum(one.stderr.count("quantkit: error: too far") for one in both) == 1
