"""What ``quantkit generate`` runs: one prompt, shown as its continuation grows, or a file of
prompts into another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from quantkit.base.arguments import as_path
from quantkit.cli.entry import raise_if_interrupted
from quantkit.cli.output import (
    mention,
    note,
    print_generated,
    print_generated_json,
    require_stdout,
    say,
)
from quantkit.cli.progress import ProgressDisplay
from quantkit.errors import RequestError
from quantkit.formats.output.lines import encode_line
from quantkit.jobs.inference.generate_file import FileJob, describe_warm_up
from quantkit.jobs.inference.prompts_file import STDIN, read_input
from quantkit.runtime.request import (
    create_promptless_request,
    text_ids,
    truncate_prompt,
    with_prompt,
)

if TYPE_CHECKING:
    from quantkit.architectures.config import ModelConfig
    from quantkit.cli.generate import GenerateArgs
    from quantkit.distributed.group import ProcessGroup
    from quantkit.model.decoder import Decoder
    from quantkit.runtime.engine import Engine
    from quantkit.runtime.generate import Pace, Runner
    from quantkit.text.tokenizer import Tokenizer


def show(args: GenerateArgs, group: ProcessGroup) -> None:
    """Print the prompt and its continuation, on rank 0."""
    from quantkit.jobs.inference.load import Placement, load, load_draft
    from quantkit.runtime.generate import Pace, generate

    if args.backend == "transformers":
        _show_by_transformers(args, group)
        return
    prompt = group.broadcast_from_rank0(_prompt(args) if group.is_rank0 else "")
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
        model, tokenizer = load(args.path, weights=args.weights, **placement)
        if args.draft is not None:
            draft = load_draft(args.draft, tokenizer, **placement)
    ids = _ids(args, prompt, model.config, tokenizer)
    pace = Pace()
    engine = _engine(args, model, len(ids), draft)
    pieces = _stream_continuations(
        args, engine, partial(generate, engine), model.config, tokenizer, prompt, ids, pace
    )
    _print(args, pieces, pace, len(ids), engine, show=group.is_rank0)


def _show_by_transformers(args: GenerateArgs, group: ProcessGroup) -> None:
    """The same through transformers, in one process."""
    from quantkit.jobs.inference.load import load_by_transformers
    from quantkit.runtime.generate import Pace

    if group.size > 1:
        raise RequestError(
            "several processes cannot share a model that transformers runs", path=args.path
        )
    prompt = _prompt(args)
    with ProgressDisplay(show=sys.stderr.isatty()) as progress:
        model, tokenizer = load_by_transformers(
            args.path,
            weights=args.weights,
            trust_remote_code=args.trust_remote_code,
            progress=progress,
        )
    ids = _ids(args, prompt, model.config, tokenizer)
    pace = Pace()
    pieces = _stream_continuations(
        args, None, model.generate, model.config, tokenizer, prompt, ids, pace
    )
    _print(args, pieces, pace, len(ids), None, show=True)


def show_on_devices(args: GenerateArgs) -> None:
    """The same through XLA; with several hosts, the first one prints."""
    from quantkit.jobs.inference.load import load_xla
    from quantkit.runtime.generate import Pace

    prompt = _prompt(args)
    with ProgressDisplay() as progress:
        model, tokenizer = load_xla(
            args.path,
            devices=args.tp,
            dtype=args.dtype,
            weights=args.weights,
            multi_host=args.multi_host,
            progress=progress,
        )
    if model.first:
        require_stdout()
    ids = _ids(args, prompt, model.config, tokenizer)
    pace = Pace(at_once=model.tokens_at_once)
    runner = model.runner(args.slots)
    pieces = _stream_continuations(
        args, runner, model.generate, model.config, tokenizer, prompt, ids, pace
    )
    _print(args, pieces, pace, len(ids), None, show=model.first)


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
    """Yield a prompt with its continuation, whose tokens `run` gives; or several continuations by
    an engine, one after the other, each below a line with its number.
    """
    from quantkit.runtime.generate import text_pieces
    from quantkit.runtime.generate_batch import completions

    if args.n == 1 or engine is None:
        tokens = run(ids, max_new_tokens=args.max_new_tokens, **args.sampling())
        yield from chain(
            [prompt], text_pieces(tokenizer, ids, pace.time_tokens(tokens), args.stop), ["\n"]
        )
        return
    if not args.sampling().get("temperature"):
        note("without `temperature` all samples are the same")
    request = with_prompt(
        config, create_promptless_request(args.max_new_tokens, args.sampling(), samples=args.n), ids
    )
    texts: dict[int, str] = {}
    shown = 0
    pace.begin()
    for completion in completions(engine, [request], tokenizer, [args.stop], pace.add):
        texts[completion.sample] = completion.text or ""
        while shown in texts:
            yield f"--- {shown + 1} of {args.n} ---\n"
            yield from (prompt, texts.pop(shown), "\n")
            shown += 1


def _engine(
    args: GenerateArgs, model: Decoder, prompt_tokens: int, draft: Decoder | None
) -> Engine:
    import torch

    from quantkit.runtime.engine import Engine

    engine = Engine(
        model,
        prompt_tokens + args.max_new_tokens,
        slots=args.slots,
        cache_dtype=torch.int8 if args.int8_cache else None,
        compiled=args.compiled,
        draft=draft,
        draft_tokens=args.draft_tokens,
    )
    if args.warmup:
        note(describe_warm_up(engine.warm_up()))
    return engine


def _prompt(args: GenerateArgs) -> str:
    """Return the prompt; from a file, without the newline at its end. Raises `RequestError` if the
    file cannot be read, is not UTF-8, or is empty.
    """
    file = STDIN if args.text == STDIN else args.prompt_file
    if file is None:
        return args.prompt or args.text or ""
    try:
        prompt = read_input(file, "prompt").decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise RequestError(
            "the prompt is not UTF-8 text", path=file, found=f"byte {error.start}"
        ) from error
    if not prompt:
        raise RequestError("the prompt is empty", path=file)
    return prompt


def _ids(args: GenerateArgs, prompt: str, config: ModelConfig, tokenizer: Tokenizer) -> list[int]:
    ids = text_ids(tokenizer, prompt, specials=True)
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


def _print(
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
    lines.append(
        f"generated: {pace.tokens} tokens" + (f", {pace.rate:.1f} tokens/s" if pace.rate else "")
    )
    if engine is not None and engine.num_proposed_tokens:
        lines.append(
            f"proposed: {engine.num_proposed_tokens} tokens,"
            f" {engine.num_accepted_tokens / engine.num_proposed_tokens:.0%} accepted"
        )
    elif pace.rate and engine is not None and args.n == 1:
        # Each token reads all weights.
        from quantkit.evals.timing import bandwidth, weight_bytes

        model = engine.model
        read = weight_bytes(model) * pace.rate
        possible = bandwidth(model.device)
        lines.append(
            f"weights: {read / 1e9:.1f} of {possible / 1e9:.1f} GB/s, {read / possible:.0%} of the"
            " memory's bandwidth"
        )
    for line in lines:
        mention(line, err=True)


def file_job(args: GenerateArgs) -> FileJob:
    """Return the job for a file of prompts. Raises `RequestError` for invalid options."""
    assert args.prompts is not None and args.output is not None
    return FileJob(
        args.path,
        as_path("prompts", args.prompts),
        (
            partial(_print_line, raw=args.raw)
            if args.output == STDIN
            else as_path("output", args.output)
        ),
        args.continuation(),
        template=args.template,
        truncate=args.truncate,
        batch_size=args.batch_size,
        resume=args.resume,
        device=args.device,
        dtype=args.dtype,
        backend=args.backend,
        allow_slow=args.allow_slow,
        devices=args.tp,
        weights=args.weights,
        int8_cache=args.int8_cache,
        compiled=args.compiled,
        warm_up=args.warmup,
    )


def run_file(job: FileJob, group: ProcessGroup) -> None:
    """Run the job, with a bar and tokens per second on stderr."""
    from quantkit.runtime.generate import Pace

    pace = Pace(at_once=0)

    def rate() -> str | None:
        if pace.rate is None:
            return None
        return f"{pace.rate:.0f} tokens/s"

    with ProgressDisplay(show=group.is_rank0, details=rate) as progress:
        made = job.run(tp=group, progress=progress, counted=pace.add)
    if group.is_rank0:
        say(made.lines(), err=made.output is None)


def _print_line(line: Mapping[str, Any], *, raw: bool) -> None:
    raise_if_interrupted()
    print_generated_json(encode_line(line), raw=raw)
