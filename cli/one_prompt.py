"""``quantkit generate`` with one prompt: what continues it, as it grows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.entry import raise_if_interrupted
from quantkit.cli.generate_args import STDIN, GenerateArgs
from quantkit.cli.output import mention, note, require_stdout
from quantkit.cli.progress import ProgressDisplay
from quantkit.errors import RequestError
from quantkit.jobs.generate_file import warmed_up
from quantkit.runtime.request import checked_options, shortened, text_ids, with_prompt

if TYPE_CHECKING:
    from quantkit.architectures.config import ModelConfig
    from quantkit.distributed.group import ProcessGroup
    from quantkit.model.decoder import Decoder
    from quantkit.runtime.engine import Engine
    from quantkit.runtime.generate import Runner
    from quantkit.runtime.stream import Pace
    from quantkit.text.tokenizer import Tokenizer


def say(asked: GenerateArgs, group: ProcessGroup) -> None:
    """Print the prompt and what continues it; of several processes the first one does."""
    from quantkit.jobs.load import load
    from quantkit.runtime.stream import Pace, text_pieces

    prompt = group.broadcast_from_rank0(_prompt(asked) if group.is_rank0 else "")
    how: dict[str, Any] = {
        "device": group.device or asked.device, "dtype": asked.dtype, "backend": asked.backend, "tp": group,
    }  # fmt: skip
    draft = None
    with ProgressDisplay(show=group.is_rank0 and sys.stderr.isatty()) as progress:
        model, tokenizer = load(asked.path, weights=asked.weights, progress=progress, **how)
        if asked.draft is not None:
            draft = load(asked.draft, progress=progress, **how)
    ids = _ids(asked, prompt, model.config, tokenizer)
    pace = Pace()
    if asked.n > 1:
        pieces = _samples(asked, _engine(asked, model, len(ids)), model.config, tokenizer, prompt, ids, pace)
    else:
        tokens = pace.timed(
            _tokens(asked, model, ids) if draft is None else _proposed(asked, model, *draft, prompt, ids)
        )
        pieces = _whole(prompt, text_pieces(tokenizer, ids, tokens, asked.stop))
    _print(pieces, show=group.is_rank0)
    if group.is_rank0:
        _tell(asked, pace, len(ids), model if draft is None and asked.n == 1 else None)


def say_on_devices(asked: GenerateArgs) -> None:
    """The same through XLA; of several hosts the first has something to say."""
    from quantkit.jobs.load import load_xla
    from quantkit.runtime.stream import Pace, text_pieces

    prompt = _prompt(asked)
    with ProgressDisplay() as progress:
        model, tokenizer = load_xla(
            asked.path, devices=asked.tp, dtype=asked.dtype, weights=asked.weights,
            multi_host=asked.multi_host, progress=progress,
        )  # fmt: skip
    if model.first:
        require_stdout()
    ids = _ids(asked, prompt, model.config, tokenizer)
    pace = Pace(at_once=model.tokens_at_once)
    if asked.n > 1:
        pieces = _samples(asked, model.runner(asked.slots), model.config, tokenizer, prompt, ids, pace)
    else:
        tokens = pace.timed(model.generate(ids, max_new_tokens=asked.max_new_tokens, **asked.sampling()))
        pieces = _whole(prompt, text_pieces(tokenizer, ids, tokens, asked.stop))
    _print(pieces, show=model.first)
    if model.first:
        _tell(asked, pace, len(ids), None)


def _whole(prompt: str, pieces: Iterable[str]) -> Iterator[str]:
    """A prompt with what continues it, ended by a new line."""
    yield prompt
    yield from pieces
    yield "\n"


def _print(pieces: Iterator[str], *, show: bool) -> None:
    for piece in pieces:
        raise_if_interrupted()
        if show:
            click.echo(piece, nl=False)


def _tokens(asked: GenerateArgs, model: Decoder, ids: list[int]) -> Iterator[int]:
    from quantkit.runtime.generate import generate

    return generate(_engine(asked, model, len(ids)), ids, max_new_tokens=asked.max_new_tokens, **asked.sampling())


def _proposed(
    asked: GenerateArgs, model: Decoder, draft: Decoder, its_tokenizer: Tokenizer, prompt: str, ids: list[int]
) -> Iterator[int]:
    """The same with the help of a smaller model.

    Raises:
        RequestError: if that reads the prompt as other tokens.
    """
    from quantkit.runtime.speculative import DRAFT_TOKENS, speculate

    if _ids(asked, prompt, model.config, its_tokenizer) != ids:
        raise RequestError("the draft model reads the prompt as other tokens", path=asked.draft)
    proposed = DRAFT_TOKENS if asked.draft_tokens is None else asked.draft_tokens
    return speculate(
        model, draft, ids, draft_tokens=proposed, max_new_tokens=asked.max_new_tokens, **asked.sampling()
    )  # fmt: skip


def _samples(
    asked: GenerateArgs, engine: Engine | Runner[Any], config: ModelConfig, tokenizer: Tokenizer, prompt: str,
    ids: list[int], pace: Pace,
) -> Iterator[str]:  # fmt: skip
    """Several continuations, one after the other, each below a line with its number."""
    from quantkit.runtime.generate_batch import completions

    if not asked.sampling_options.get("temperature"):
        note("without `temperature` all samples are alike")
    request = with_prompt(config, checked_options(asked.max_new_tokens, asked.sampling(), samples=asked.n), ids)
    texts: dict[int, str] = {}
    told = 0
    pace.begin()
    for one in completions(engine, [request], tokenizer, [asked.stop], pace.add):
        texts[one.sample] = one.text or ""
        while told in texts:
            yield f"--- {told + 1} of {asked.n} ---\n"
            yield from _whole(prompt, [texts.pop(told)])
            told += 1


def _engine(asked: GenerateArgs, model: Decoder, prompt_tokens: int) -> Engine:
    import torch

    from quantkit.runtime.engine import Engine

    engine = Engine(
        model, prompt_tokens + asked.max_new_tokens, slots=asked.slots,
        cache_dtype=torch.int8 if asked.int8_cache else None, compiled=asked.compiled,
    )  # fmt: skip
    if asked.warmup:
        note(warmed_up(engine.warm_up()))
    return engine


def _prompt(asked: GenerateArgs) -> str:
    """The prompt; where it is read from a file, without the new line at its end.

    Raises:
        RequestError: if the file cannot be read, or holds no text.
    """
    file = STDIN if asked.text == STDIN else asked.prompt_file
    if file is None:
        return asked.prompt or asked.text or ""
    prompt = _content(file).removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise RequestError("the prompt is empty", path=file)
    return prompt


def _content(file: str) -> str:
    try:
        with open(0 if file == STDIN else file, "rb", closefd=file != STDIN) as source:
            return source.read().decode()
    except OSError as error:
        raise RequestError(f"the prompt cannot be read: {error.strerror}", path=file) from error
    except UnicodeDecodeError as error:
        raise RequestError(
            "the prompt is not a text", path=file, found=f"byte {error.start}", expected="UTF-8"
        ) from error


def _ids(asked: GenerateArgs, prompt: str, config: ModelConfig, tokenizer: Tokenizer) -> list[int]:
    ids = text_ids(tokenizer, prompt, specials=True)
    most = config.max_unscaled_context if asked.backend == "xla" else config.max_positions
    return shortened(ids, most, asked.max_new_tokens, config.bos_token_id) if asked.truncate else ids


def _tell(asked: GenerateArgs, pace: Pace, prompt_tokens: int, model: Decoder | None) -> None:
    """Say on stderr how fast it was: a line on a terminal, all there is where it is asked for.

    Args:
        model: all of whose weights each token took; None where that is not so.
    """
    if not asked.stats:
        if sys.stderr.isatty():
            mention(pace.line(), err=True)
        return
    lines = [f"prompt: {prompt_tokens} tokens"]
    if pace.first_after is not None:
        lines[0] += f", first token after {pace.first_after:.3f} s"
    lines.append(f"generated: {pace.tokens} tokens" + (f", {pace.rate:.1f} tokens/s" if pace.rate else ""))
    if pace.rate and model is not None:
        from quantkit.evals.timing import bandwidth, weight_bytes

        read, possible = weight_bytes(model) * pace.rate, bandwidth(model.device)
        lines.append(
            f"weights: {read / 1e9:.1f} of {possible / 1e9:.1f} GB/s, {read / possible:.0%} of the memory's bandwidth"
        )
    for line in lines:
        mention(line, err=True)
