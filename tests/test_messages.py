"""Messages in which options are data."""

from __future__ import annotations

import pickle

import click
import pytest

from quantkit.base.messages import Message, Option
from quantkit.cli import hints
from quantkit.cli.main import quantkit as cli
from quantkit.errors import RequestError

_ADVICE = Message("round it with ", Option("method", "rtn"), ", or give ", Option("calibration"))


def test_a_message_is_spelled_as_python_does() -> None:
    assert _ADVICE == 'round it with `method="rtn"`, or give `calibration`'


def test_messages_are_joined_and_keep_their_options() -> None:
    joined = Message("note: ", _ADVICE)
    assert joined.parts == ("note: ", *_ADVICE.parts)


def test_a_message_can_be_sent_to_another_process() -> None:
    copied = pickle.loads(pickle.dumps(_ADVICE))
    assert copied == _ADVICE
    assert copied.parts == _ADVICE.parts


def test_an_error_keeps_the_options_of_its_parts() -> None:
    error = RequestError(
        "no samples",
        path="model",
        found=Option("samples", 0),
        expected=1,
        hint=Message("give ", Option("samples", metavar="N")),
    )
    assert str(error) == "model: no samples (found `samples=0`, expected 1); give `samples=N`"
    assert error.message.render(lambda option: option.name.upper()) == (
        "model: no samples (found SAMPLES, expected 1); give SAMPLES"
    )


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> click.Command:
    """Let messages be printed for `quantkit quantize`."""
    command = cli.get_command(click.Context(cli), "quantize")
    assert command is not None
    monkeypatch.setattr(hints, "_command", command)
    return command


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (Option("method", "rtn"), "--method rtn"),
        (Option("resume", True), "--resume"),
        (Option("source_check", False), "--no-source-check"),
        (Option("activation_memory"), "--activation-memory"),
        (Option("calibration", metavar="FILE"), "--calibration FILE"),
        (Option("src"), "SRC"),
        (Option("dequantize", True, job="convert"), "--dequantize of quantkit convert"),
    ],
)
def test_a_command_spells_its_own_options(
    option: Option, expected: str, command: click.Command
) -> None:
    assert hints.spell(Message(option)) == expected


def test_an_option_that_the_command_does_not_have_fails_the_tests(command: click.Command) -> None:
    with pytest.raises(hints.UnknownOptionError):
        hints.spell_option(Option("temperature", 0.5))
