"""What ``quantkit generate`` does with one prompt: show its continuation as it grows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from quantkit.base.late import LateModule
from quantkit.base.messages import Message, Option
from quantkit.cli.output import (
    mention,
    mention_memory,
    note,
    print_generated,
    require_stdout,
)
from quantkit.cli.progress import ProgressDisplay
from quantkit.cli.signals import raise_if_interrupted
from quantkit.errors import RequestError
from quantkit.jobs.inference.standard_input import STDIN, read_input
from quantkit.runtime.request import (
    create_promptless_request,
    describe_warm_up,
    text_ids,
    truncate_prompt,
    with_prompt,
)

if TYPE_CHECKING:
    from quantkit.architectures.config import ModelConfig
    from quantkit.cli.generate_args import GenerateArgs
    from quantkit.distributed.group import ProcessGroup
    from quantkit.model.decoder import Decoder
    from quantkit.runtime import generate_batch
    from quantkit.runtime.engine import Engine
    from quantkit.runtime.generate import Pace, Runner
    from quantkit.text.tokenizer import Tokenizer
else:
    generate_batch = LateModule("quantkit.runtime.generate_batch")


def show_continuation(args: GenerateArgs, group: ProcessGroup) -> None:
    """Print the prompt and its continuation, on rank 0."""
    from quantkit.jobs.inference.load import (
        Placement,
        load_draft,
        load_opened,
        measure_opened,
        open_with_tokenizer,
    )
    from quantkit.runtime.generate import Pace, generate

    if args.backend == "transformers":
        _show_by_transformers(args, group)
        return
    # Rank 0 alone reads stdin and prompt files, which other machines need not have.
    prompt = group.broadcast_from_rank0(_read_prompt(args) if group.is_rank0 else "")
    draft = None
    with ProgressDisplay(show=group.is_rank0 and sys.stderr.isatty()) as progress:
        placement: Placement = {
            "device": group.device or args.device,
            "dtype": args.dtype,
            "backend": args.backend,
            "allow_slow": args.allow_slow,
            "tp": group,
            "progress": progress,
        }
        checkpoint, tokenizer = open_with_tokenizer(args.path, args.weights, args.dtype)
        ids = _tokenize_prompt(args, prompt, checkpoint.config, tokenizer)
        length = len(ids) + args.max_new_tokens
        memory = measure_opened(
            checkpoint,
            length=length,
            slots=args.slots,
            int8_cache=args.int8_cache,
            **placement,
        )
        if group.is_rank0:
            mention_memory(memory.text(length, args.slots), always=args.stats)
        model = load_opened(checkpoint, **placement)
        if args.draft is not None:
            draft = load_draft(args.draft, tokenizer, **placement)
    pace = Pace()
    engine = _create_engine(args, model, len(ids), draft)
    pieces = _stream_continuations(
        args, engine, partial(generate, engine), model.config, tokenizer, prompt, ids, pace
    )
    _print_with_speed(args, pieces, pace, len(ids), engine, show=group.is_rank0)


def _show_by_transformers(args: GenerateArgs, group: ProcessGroup) -> None:
    """Print the prompt and its continuation through transformers, in one process."""
    from quantkit.jobs.inference.load import load_by_transformers
    from quantkit.runtime.generate import Pace

    if group.size > 1:
        raise RequestError(
            "several processes cannot share a model that transformers runs", path=args.path
        )
    prompt = _read_prompt(args)
    with ProgressDisplay(show=sys.stderr.isatty()) as progress:
        model, tokenizer = load_by_transformers(
            args.path,
            weights=args.weights,
            trust_remote_code=args.trust_remote_code,
            progress=progress,
        )
    mention_memory(model.memory.text(0), always=args.stats)
    ids = _tokenize_prompt(args, prompt, model.config, tokenizer)
    pace = Pace()
    pieces = _stream_continuations(
        args, None, model.generate, model.config, tokenizer, prompt, ids, pace
    )
    _print_with_speed(args, pieces, pace, len(ids), None, show=True)


def show_by_xla(args: GenerateArgs) -> None:
    """Print the prompt and its continuation through XLA, with several hosts on the first one."""
    from quantkit.jobs.inference.load import load_xla
    from quantkit.runtime.generate import Pace

    prompt = _read_prompt(args)
    with ProgressDisplay() as progress:
        model, tokenizer = load_xla(
            args.path,
            devices=args.tp,
            dtype=args.dtype,
            weights=args.weights,
            multi_host=args.multi_host,
            progress=progress,
        )
    # Which host prints is known only after the runtime has connected them.
    if model.first:
        require_stdout()
    ids = _tokenize_prompt(args, prompt, model.config, tokenizer)
    pace = Pace(at_once=model.tokens_at_once)
    runner = model.runner(args.slots)
    pieces = _stream_continuations(
        args, runner, model.generate, model.config, tokenizer, prompt, ids, pace
    )
    _print_with_speed(args, pieces, pace, len(ids), None, show=model.first)


def _stream_continuations(
    args: GenerateArgs,
    engine: Engine | Runner[Any] | None,
    run: Callable[..., Iterator[int]],
    config: ModelConfig,
    tokenizer: Tokenizer,
    prompt: str,
    ids: list[int],
    pace: Pace,
) -> Iterator[str]:
    """Yield a prompt with its continuation, whose tokens `run` yields; or several continuations by
    an engine, one after the other, each below a line with its number.
    """
    from quantkit.runtime.generate import text_pieces

    if args.n == 1 or engine is None:
        tokens = run(ids, max_new_tokens=args.max_new_tokens, **args.sampling())
        pieces = text_pieces(tokenizer, ids, pace.time_tokens(tokens), args.stop)
        yield from chain([prompt], pieces, ["\n"])
        return
    if not args.sampling().get("temperature"):
        note(Message("without ", Option("temperature"), " all samples are the same"))
    promptless_request = create_promptless_request(
        args.max_new_tokens, args.sampling(), samples=args.n
    )
    request = with_prompt(config, promptless_request, ids)
    # Samples end in any order. A text waits here until all samples before it are shown.
    texts: dict[int, str] = {}
    num_shown = 0
    pace.begin()
    for completion in generate_batch.completions(
        engine, [request], tokenizer, [args.stop], pace.add
    ):
        texts[completion.sample] = completion.text or ""
        while num_shown in texts:
            yield f"--- {num_shown + 1} of {args.n} ---\n"
            yield from (prompt, texts.pop(num_shown), "\n")
            num_shown += 1


def _create_engine(
    args: GenerateArgs, model: Decoder, prompt_tokens: int, draft: Decoder | None
) -> Engine:
    """Create an engine with room for the prompt and its continuation, compiled if requested."""
    import torch

    from quantkit.runtime.engine import Engine

    if args.int8_cache:
        cache_dtype = torch.int8
    else:
        cache_dtype = None
    engine = Engine(
        model,
        prompt_tokens + args.max_new_tokens,
        slots=args.slots,
        cache_dtype=cache_dtype,
        compiled=args.compiled,
        draft=draft,
        draft_tokens=args.draft_tokens,
    )
    if args.warmup:
        note(describe_warm_up(engine.warm_up()))
    return engine


def _read_prompt(args: GenerateArgs) -> str:
    """Read the prompt; from a file, without the newline at its end. Raises `RequestError` if the
    file cannot be read, is not UTF-8, or is empty.
    """
    file = STDIN if args.text == STDIN else args.prompt_file
    if file is None:
        return args.prompt or args.text or ""
    try:
        text = read_input(file, "prompt").decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            "the prompt is not UTF-8 text", path=file, found=f"byte {error.start}"
        ) from error
    # Editors and `echo` end a text with a newline, or with CR and LF on Windows. The model would
    # continue the empty line after it.
    prompt = text.removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise RequestError("the prompt is empty", path=file)
    return prompt


def _tokenize_prompt(
    args: GenerateArgs, prompt: str, config: ModelConfig, tokenizer: Tokenizer
) -> list[int]:
    """Tokenize the prompt, and cut off its beginning if --truncate allows that."""
    ids = text_ids(tokenizer, prompt, specials=True)
    # The XLA engine refuses sequences beyond this length, where some rotary scalings change.
    if args.backend == "xla":
        max_tokens = config.max_unscaled_context
    else:
        max_tokens = config.max_positions
    if config.bos_token_id is None:
        bos = tokenizer.bos_id
    else:
        bos = config.bos_token_id
    if args.truncate:
        return truncate_prompt(ids, max_tokens, args.max_new_tokens, bos)
    return ids


def _print_with_speed(
    args: GenerateArgs,
    pieces: Iterator[str],
    pace: Pace,
    prompt_tokens: int,
    engine: Engine | None,
    *,
    show: bool,
) -> None:
    """Print the text, and the speed on stderr: a line on a terminal, more with --stats. Without
    `show` only generate, as another process prints.
    """
    for piece in pieces:
        raise_if_interrupted()
        if show:
            print_generated(piece, raw=args.raw)
    if not show:
        return
    if not args.stats:
        if sys.stderr.isatty():
            mention(pace.line(), err=True)
        return
    lines = [f"prompt: {prompt_tokens} tokens"]
    if pace.first_after is not None:
        lines[0] += f", first token after {pace.first_after:.3f} s"
    generated = f"generated: {pace.num_tokens} tokens"
    if pace.rate:
        generated += f", {pace.rate:.1f} tokens/s"
    lines.append(generated)
    if engine is not None and engine.num_proposed_tokens:
        lines.append(
            f"proposed: {engine.num_proposed_tokens} tokens,"
            f" {engine.num_accepted_tokens / engine.num_proposed_tokens:.0%} accepted"
        )
    elif pace.rate and engine is not None and args.n == 1:
        # Each token reads all weights once, so the rate of tokens is also a rate of memory. That is
        # not so with proposals or several samples, where one reading serves several tokens.
        from quantkit.evals.timing import measure_bandwidth, weight_bytes

        model = engine.model
        read_rate = weight_bytes(model) * pace.rate
        max_rate = measure_bandwidth(model.device)
        lines.append(
            f"weights: {read_rate / 1e9:.1f} of {max_rate / 1e9:.1f} GB/s,"
            f" {read_rate / max_rate:.0%} of the memory's bandwidth"
        )
    for line in lines:
        mention(line, err=True)
