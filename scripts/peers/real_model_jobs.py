"""The jobs of `real_models.py` on published models and tokenizers.

Each raises `CheckFailed`, or returns a detail.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import real_model_judges as judges
import torch
from real_model_judges import CheckFailed, require
from safetensors.torch import save_file

RANDOM_SHARE = 0.1  # of random strings that llama.cpp may cut otherwise
NEW_TOKENS = 24
KL_OF_CONVERSION = 2e-3  # bfloat16 activations of llama.cpp cost 1e-4
KL_SHARE = 0.15  # how far the gate's figure may be from the judge's, of the larger
KL_ROUNDING = 1e-3  # and below this they may differ by as much
EIGHT_BIT_ACTIVATIONS = 0.02  # what llama.cpp's rounding of activations adds at most
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time,  there",
    "1, 2, 3, 5, 8,",
)
MESSAGES = [
    {"role": "user", "content": "Name  three colors.\n"},
    {"role": "assistant", "content": "Red, green, blue."},
    {"role": "user", "content": "And <b>one</b> more, é?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Return the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
FORMATS = ("compressed-tensors", "gptq", "awq", "mlx", "gguf")
FILE_TYPES = {"q4_k_m": 15, "q8_0": 7}
CONTROL = 3  # the type of control tokens in GGUF
FAMILIES = {
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
    "llama3_1": "llama",
    "llama3": "llama",
    "llama2": "llama",
    "gptoss": "llama",
    "deepseek_v3": "llama",
}
"""The ``model_type`` of the tiny model that a published tokenizer is attached to."""


MIN_REFINE_SAMPLES = 32


@dataclass(frozen=True)
class Settings:
    """What all jobs share: llama.cpp's Python, how much calibration, and how many texts
    tokenizers are compared on.
    """

    peer: Path | None
    samples: int
    length: int
    texts: int = 400


@dataclass(frozen=True)
class Subject:
    """A published GGUF file, or a folder with a published tokenizer, and the folder of its
    results.
    """

    name: str
    source: Path
    work: Path
    settings: Settings

    def path(self, name: str) -> Path:
        """Return the path of a result."""
        return self.work / name


@dataclass(frozen=True)
class Job:
    """One row of the matrix: what to run, who judges it, and the jobs whose results it reads."""

    name: str
    judge: str
    check: Callable[[Subject], str]
    needs: tuple[str, ...] = ()


def remove(path: Path) -> None:
    """Remove a file or a folder, with its manifest and what an interrupted run left of it."""
    for leftover in (
        path,
        path.with_name(f"{path.name}.partial"),
        path.with_name(f"{path.name}.quantkit.json"),
    ):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)


def run_quantkit(
    subject: Subject, *arguments: str | Path, output: Path | None = None, code: int = 0
) -> str:
    """Run one command and return its stdout.

    Args:
        output: what it writes; an earlier result there is removed first.
        code: the exit code that it must have.
    """
    if output is not None:
        remove(output)
    command = [sys.executable, "-m", "quantkit.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    with (subject.work / "commands.log").open("a", encoding="utf-8") as log:
        log.write(
            f"$ quantkit {' '.join(command[3:])}\n{done.stdout}{done.stderr}exit code"
            f" {done.returncode}\n"
        )
    if done.returncode != code:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        message = lines[-1] if lines else ""
        raise CheckFailed(f"{arguments[0]}: exit code {done.returncode}, not {code}: {message}")
    return done.stdout


def read_report(
    subject: Subject, *arguments: str | Path, output: Path | None = None, code: int = 0
) -> Any:
    """Run one command and return what it writes as JSON."""
    return json.loads(run_quantkit(subject, *arguments, "--json", "-", output=output, code=code))


@contextmanager
def open_llama_cpp(subject: Subject, file: Path) -> Iterator[judges.Theirs]:
    """Run llama.cpp on a file while the block lasts."""
    assert subject.settings.peer is not None, "the options require --peer"
    peer = judges.start_llama_cpp(subject.settings.peer, file)
    try:
        yield peer
    finally:
        peer.close()


# Published models: conversion


def inspect_file(subject: Subject) -> str:
    """Compare `inspect` with the metadata and tensors that the gguf package reads."""
    report = read_report(subject, "inspect", subject.source)
    metadata, tensors = judges.read_gguf(subject.source)
    architecture = metadata["general.architecture"]
    expected = {
        "layers": metadata[f"{architecture}.block_count"],
        "hidden_size": metadata[f"{architecture}.embedding_length"],
        "heads": metadata[f"{architecture}.attention.head_count"],
        "kv_heads": metadata[f"{architecture}.attention.head_count_kv"],
        "context": metadata[f"{architecture}.context_length"],
        "vocabulary": int(tensors["token_embd.weight"].shape[1]),
        "tied_embeddings": "output.weight" not in tensors,
        "parameters": sum(int(tensor.n_elements) for tensor in tensors.values()),
    }
    for key, value in expected.items():
        require(report[key] == value, f"{key}: {report[key]}, not {value}")
    return f"{len(expected)} values"


def convert_to_folder(subject: Subject) -> str:
    """Convert the file to a folder of floats, and compare logits with transformers' own reader
    of GGUF.
    """
    folder = subject.path("folder")
    run_quantkit(subject, "convert", subject.source, folder, "--dequantize", output=folder)
    reference = judges.load_model(subject.source)
    model = judges.load_model(folder)
    windows = judges.cut_windows(judges.load_tokenizer(folder))
    kl = judges.measure_kl(reference, model, windows)
    require(kl < KL_OF_CONVERSION, f"KL {kl:.2g}")
    return f"KL {kl:.2g}"


def compare_tokens(subject: Subject) -> str:
    """Compare the folder's tokens in transformers with llama.cpp's of the published file, and
    with quantkit's.
    """
    lines = judges.load_texts(subject.settings.texts)
    compare_own_tokens(subject.path("folder"), subject.path("folder"), lines)
    return compare_tokens_with_llama_cpp(subject, subject.path("folder"), subject.source)


def compare_own_tokens(path: Path, folder: Path, lines: Sequence[str]) -> None:
    """Compare quantkit's tokens of a path with transformers' of a folder."""
    from quantkit.text.tokenizer import load_tokenizer

    tokenizer = judges.load_tokenizer(folder)
    tokens = load_tokenizer(path)
    rows = [tokens.encode(line, specials=True) for line in lines]
    expected = [judges.encode(tokenizer, line) for line in lines]
    differences = judges.describe_differences(lines, rows, expected)
    require(not differences, f"quantkit's tokens of {path.name}: {differences}")


def compare_tokens_with_llama_cpp(subject: Subject, folder: Path, file: Path) -> str:
    """Compare the tokens of a folder in transformers with llama.cpp's of a file, on strings in NFC.

    All running text must be cut the same way. llama.cpp's own patterns differ from the published
    ones on some rare marks, so a small share of random strings may be cut otherwise.
    """
    tokenizer = judges.load_tokenizer(folder)
    details = []
    with open_llama_cpp(subject, file) as peer:
        for kind, lines, allowed in (
            ("lines", judges.load_lines(), 0.0),
            ("random strings", judges.load_random_strings(subject.settings.texts), RANDOM_SHARE),
        ):
            lines = judges.normalize(lines)
            rows = [judges.encode(tokenizer, line) for line in lines]
            expected = [peer.request(tokens=line) for line in lines]
            differing = sum(
                row != expected_row for row, expected_row in zip(rows, expected, strict=True)
            )
            differences = judges.describe_differences(lines, rows, expected)
            require(differing <= allowed * len(lines), f"tokens of {kind}: {differences}")
            details.append(f"{len(lines) - differing} of {len(lines)} {kind}")
    return ", ".join(details)


def check_end_tokens(subject: Subject) -> str:
    """Require that the folder's end tokens are named by the file's metadata, or are control
    tokens of llama.cpp's.
    """
    metadata, _ = judges.read_gguf(subject.source)
    ends = judges.read_json(subject.path("folder") / "generation_config.json")["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    prefix = "tokenizer.ggml"
    named = {metadata.get(f"{prefix}.{kind}_token_id") for kind in ("eos", "eot", "eom")}
    types, tokens = metadata[f"{prefix}.token_type"], metadata[f"{prefix}.tokens"]
    with open_llama_cpp(subject, subject.source) as peer:
        stopping = set(peer.request(ends=True))
    for token in ends:
        is_control = types[token] == CONTROL and token in stopping
        require(
            token in named or is_control,
            f"end token {token} is {tokens[token]!r}, of type {types[token]}",
        )
    eos = metadata[f"{prefix}.eos_token_id"]
    require(eos in ends, f"end tokens {ends} lack {eos}")
    return f"end tokens {ends}"


def convert_back(subject: Subject) -> str:
    """Convert the folder to GGUF: numbers by the gguf package, tokens and logits by llama.cpp."""
    folder, file = subject.path("folder"), subject.path("back.gguf")
    run_quantkit(subject, "convert", folder, file, output=file)
    _, original = judges.read_gguf(subject.source)
    _, tensors = judges.read_gguf(file)
    require(
        set(tensors) <= set(original), f"more tensors: {sorted(set(tensors) - set(original))[:3]}"
    )
    missing = set(original) - set(tensors) - {"output.weight"}  # a tied head may be left out
    require(not missing, f"fewer tensors: {sorted(missing)[:3]}")
    for name, tensor in tensors.items():
        values = judges.dequantize_gguf(tensor).float()
        expected = judges.dequantize_gguf(original[name])
        if values.ndim > 1:
            difference = (values - expected.bfloat16().float()).abs().max().item()
            require(difference == 0, f"{name} differs by {difference:.2g}")
        else:
            # Gemma's norms are stored with 1 added, and rounded without it.
            bound = 2**-8 * (expected.abs().max().item() + 1)
            difference = (values - expected).abs().max().item()
            require(difference <= bound, f"{name} differs by {difference:.2g}, bound {bound:.2g}")
    kl = measure_kl_by_llama_cpp(subject, file)
    require(kl < KL_OF_CONVERSION, f"KL {kl:.2g}")
    return f"KL {kl:.2g}, {compare_tokens_with_llama_cpp(subject, folder, file)}"


def measure_kl_by_llama_cpp(subject: Subject, file: Path) -> float:
    """Return KL(folder || file) where transformers computes the folder and llama.cpp the file."""
    reference = judges.load_model(subject.path("folder"))
    windows = judges.cut_windows(judges.load_tokenizer(subject.path("folder")))
    with open_llama_cpp(subject, file) as peer:
        kl: float = judges.measure_kl_of_file(reference, peer, windows)
    return kl


def check_doctor(subject: Subject) -> str:
    """Require that `doctor` accepts the folder, and not a copy in which transformers misses a
    tensor.
    """
    folder, damaged = subject.path("folder"), subject.path("damaged")
    run_quantkit(subject, "doctor", folder)
    require(not judges.find_missing_tensors(folder), "transformers misses tensors of the folder")
    remove(damaged)
    damaged.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, damaged)
    tensors = judges.load_tensors(folder)
    victim = next(
        name for name in tensors if "layers.1." in name and name.endswith("down_proj.weight")
    )
    del tensors[victim]
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    require(
        judges.find_missing_tensors(damaged) == {victim}, f"transformers does not miss {victim}"
    )
    try:
        run_quantkit(subject, "doctor", damaged, code=12)
    finally:
        remove(damaged)
    return f"found that {victim} is missing"


# Published models: quantization


def quantize_to_folder(scheme: str) -> Callable[[Subject], str]:
    """Return the job that quantizes to a scheme, judged by what transformers computes with the
    result.
    """

    def check(subject: Subject) -> str:
        folder, output = subject.path("folder"), subject.path(scheme)
        # transformers does not load a quantized embedding.
        report = quantize(subject, scheme, output, "--embedding", "keep")
        reference = judges.load_model(folder)
        windows = judges.cut_windows(judges.load_tokenizer(folder))
        kl = judges.measure_kl(reference, judges.load_model(output), windows)
        detail = compare_with_gate(report, kl)
        if scheme.startswith("int4"):
            judges.round_linears(reference, int(scheme.partition("-g")[2]))
            rounded_kl = judges.measure_kl(judges.load_model(folder), reference, windows)
            require(kl < rounded_kl, f"KL {kl:.3g}, {rounded_kl:.3g} by rounding alone")
            detail += f", {rounded_kl:.3g} by rounding alone"
        return detail

    return check


def quantize_to_file(scheme: str) -> Callable[[Subject], str]:
    """Return the job that quantizes to GGUF, judged by the gguf package and by what llama.cpp
    computes.
    """

    def check(subject: Subject) -> str:
        output = subject.path(f"{scheme}.gguf")
        report = quantize(subject, scheme, output)
        metadata, _ = judges.read_gguf(output)
        file_type = metadata["general.file_type"]
        require(
            file_type == FILE_TYPES[scheme],
            f"general.file_type is {file_type}, not {FILE_TYPES[scheme]}",
        )
        return compare_with_gate(
            report, measure_kl_by_llama_cpp(subject, output), more=EIGHT_BIT_ACTIVATIONS
        )

    return check


def quantize(subject: Subject, scheme: str, output: Path, *options: str) -> Any:
    """Quantize the folder with few samples and return the report."""
    arguments: list[str | Path] = [
        "quantize",
        subject.path("folder"),
        output,
        "--scheme",
        scheme,
        *options,
    ]
    calibrated = scheme.startswith(("int4", "q4_k")) and "rtn" not in options
    if calibrated:
        arguments += [
            "--samples",
            str(subject.settings.samples),
            "--length",
            str(subject.settings.length),
        ]
    return read_report(subject, *arguments, output=output)


def compare_with_gate(report: Any, kl: float, more: float = 0.0) -> str:
    """Compare a judge's KL with the gate's figure for the same texts.

    Args:
        more: what the judge's arithmetic may add.
    """
    gate_kls = [text["kl"] for text in report["quality"]["texts"]]
    gate_kl = sum(gate_kls) / len(gate_kls)
    bound = KL_SHARE * max(kl, gate_kl) + KL_ROUNDING
    detail = f"KL {kl:.3g}, the gate's {gate_kl:.3g}"
    require(-bound <= kl - gate_kl <= bound + more, detail)
    return detail


def write_formats(subject: Subject) -> str:
    """Quantize once to five formats: each must be as near to the floats as what transformers
    reads of the first.
    """
    output = subject.path("formats")
    quantize(
        subject,
        "int4-g64",
        output,
        "--method",
        "rtn",
        "--accept-quality-loss",
        "--to",
        ",".join(FORMATS),
    )
    rounded = judges.load_weights(output / FORMATS[0])
    floats = judges.load_weights(subject.path("folder"))
    details = []
    for name in ("gptq", "awq", "mlx"):
        details.append(
            f"{name} {judges.compare_unpacked(name, output / name, rounded, floats)} linears"
        )
    (file,) = (output / "gguf").glob("*.gguf")
    windows = judges.cut_windows(judges.load_tokenizer(subject.path("folder")))
    reference = judges.load_model(subject.path("folder"))
    kl = judges.measure_kl(reference, judges.load_model(file), windows)
    expected = judges.measure_kl(reference, judges.load_model(output / FORMATS[0]), windows)
    require(kl < 1.2 * expected, f"gguf: KL {kl:.3g}, {expected:.3g} of compressed-tensors")
    return f"{', '.join(details)}, gguf KL {kl:.3g}, {expected:.3g} of compressed-tensors"


def merge_lora(subject: Subject) -> str:
    """Merge a random adapter, and compare every tensor with what PEFT merges."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
    folder, adapter, output = (
        subject.path("folder"),
        subject.path("adapter"),
        subject.path("merged"),
    )
    remove(adapter)
    base = {
        name: value.clone()
        for name, value in judges.load_model(folder, torch.bfloat16).state_dict().items()
    }
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=12,
        init_lora_weights=False,
        target_modules=["q_proj", "v_proj", "down_proj"],
    )
    torch.manual_seed(0)
    tuned = peft.get_peft_model(judges.load_model(folder, torch.bfloat16), settings)
    tuned.save_pretrained(str(adapter))
    expected = tuned.merge_and_unload().state_dict()
    # A random adapter makes nonsense of the model, which the source check would refuse.
    run_quantkit(
        subject, "convert", folder, output, "--lora", adapter, "--no-source-check", output=output
    )
    merged = judges.load_model(output, torch.bfloat16).state_dict()
    changed = 0
    for name, value in expected.items():
        bound = 2**-7 * value.abs().max().item()  # one rounding to bfloat16 more
        difference = (merged[name].float() - value.float()).abs().max().item()
        require(difference <= bound, f"{name} differs from PEFT's by {difference:.2g}")
        changed += not torch.equal(base[name], merged[name])
    linears = sum("_proj" in name and name.endswith("weight") for name in expected)
    require(0 < changed < linears, f"{changed} of {linears} linears changed")
    remove(output)
    return f"{changed} tensors changed as PEFT changes them"


def refine(subject: Subject) -> str:
    """Refine a rounded model: transformers must find the result nearer to the floats."""
    folder, output, rounded = (
        subject.path("folder"),
        subject.path("refined"),
        subject.path("formats"),
    )
    # Training takes some steps to gain anything: 8 samples would be one step in each epoch.
    samples = max(subject.settings.samples, MIN_REFINE_SAMPLES)
    few = ["--samples", str(samples), "--length", str(subject.settings.length), "--epochs", "2"]
    arguments: list[str | Path] = [
        "refine",
        rounded / FORMATS[0],
        output,
        "--against",
        folder,
        *few,
        "--accept-quality-loss",
    ]
    run_quantkit(subject, *arguments, output=output)
    reference = judges.load_model(folder)
    windows = judges.cut_windows(judges.load_tokenizer(folder))
    before = judges.measure_kl(reference, judges.load_model(rounded / FORMATS[0]), windows)
    after = judges.measure_kl(reference, judges.load_model(output), windows)
    require(after < before, f"KL {after:.3g} after, {before:.3g} before")
    return f"KL {after:.3g} after, {before:.3g} before"


def check_verify(subject: Subject) -> str:
    """Require the exit codes of `verify` for a folder and its file, its int8 model, and a
    changed copy.
    """
    folder, changed = subject.path("folder"), subject.path("changed")
    run_quantkit(subject, "verify", folder, subject.path("back.gguf"))
    run_quantkit(subject, "verify", folder, subject.path("int8"))
    run_quantkit(subject, "verify", "--strict", folder, subject.path("int8"), code=10)
    remove(changed)
    shutil.copytree(folder, changed)
    tensors = judges.load_tensors(folder)
    victim = next(
        name for name in tensors if "layers.1." in name and name.endswith("down_proj.weight")
    )
    tensors[victim] = tensors[victim].roll(1, 0)
    for file in changed.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    try:
        run_quantkit(subject, "verify", folder, changed, code=11)
        run_quantkit(subject, "verify", subject.source, folder)
    finally:
        remove(changed)
    return (
        f"0 for the file, int8 and the source, 10 for int8 with --strict, 11 where {victim} is"
        " shifted"
    )


# Published models: use


def evaluate(subject: Subject) -> str:
    """Compare the perplexity of `eval` with transformers' on the same windows."""
    from quantkit.data.files import gate_texts

    folder, text = subject.path("folder"), subject.path("text.txt")
    text.write_text(gate_texts()["mixed"], encoding="utf-8")
    arguments: list[str | Path] = ["eval", folder, "--text", text, "--window", str(judges.WINDOW)]
    report = read_report(subject, *arguments)
    (figures,) = report["rows"][0]["texts"].values()
    ids = judges.encode(judges.load_tokenizer(folder), text.read_text(encoding="utf-8"))
    expected = judges.measure_perplexity(judges.load_model(folder), ids, judges.WINDOW)
    actual = figures["token_perplexity"]
    require(
        abs(actual / expected - 1) < 0.005,
        f"perplexity {actual:.3f}, {expected:.3f} by transformers",
    )
    return f"perplexity {actual:.3f}, {expected:.3f} by transformers"


def generate(subject: Subject) -> str:
    """Compare greedy texts with those that transformers generates."""
    folder, prompts, output = (
        subject.path("folder"),
        subject.path("prompts.jsonl"),
        subject.path("texts.jsonl"),
    )
    prompts.write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8"
    )
    arguments: list[str | Path] = [
        "generate",
        folder,
        "--prompts",
        prompts,
        "--output",
        output,
        "--dtype",
        "fp32",
    ]
    run_quantkit(
        subject,
        *arguments,
        "--temperature",
        "0",
        "--max-new-tokens",
        str(NEW_TOKENS),
        output=output,
    )
    tokenizer, model = judges.load_tokenizer(folder), judges.load_model(folder)
    lines = output.read_text(encoding="utf-8").splitlines()
    require(len(lines) == len(PROMPTS), f"{len(lines)} results of {len(PROMPTS)} prompts")
    for line, prompt in zip(lines, PROMPTS, strict=True):
        expected = continue_text(tokenizer, model, judges.encode(tokenizer, prompt))
        actual = json.loads(line)["text"]
        require(
            actual == expected and len(actual) > 0,
            f"{prompt!r}: {actual[:60]!r}, not {expected[:60]!r}",
        )
    return f"{len(lines)} texts of {NEW_TOKENS} tokens"


def continue_text(tokenizer: Any, model: Any, ids: Sequence[int]) -> str:
    """Return the text that transformers generates after token ids; a space at its beginning is
    kept.
    """
    new_ids = judges.continue_greedily(model, ids, NEW_TOKENS)
    before: str = tokenizer.decode(ids, skip_special_tokens=True)
    after: str = tokenizer.decode([*ids, *new_ids], skip_special_tokens=True)
    return after.removeprefix(before)


@contextmanager
def start_server(subject: Subject) -> Iterator[str]:
    """Serve the folder while the block lasts, at the address that it yields."""
    arguments: list[str | Path] = [
        "serve",
        subject.path("folder"),
        "--port",
        "0",
        "--dtype",
        "fp32",
        "--name",
        subject.name,
    ]
    command = [sys.executable, "-m", "quantkit.cli", *map(str, arguments), "--context", "2048"]
    with (subject.work / "server.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            address = re.search(r"http://\S+/v1", process.stdout.readline())
            require(
                address is not None, f"the server does not start: {subject.work / 'server.log'}"
            )
            assert address is not None
            yield address[0]
        finally:
            process.kill()
            process.communicate()


def serve(subject: Subject) -> str:
    """Compare answers of the server, by OpenAI's client, with greedy texts of transformers."""
    from openai import OpenAI

    folder = subject.path("folder")
    tokenizer, model = judges.load_tokenizer(folder), judges.load_model(folder)
    settings: dict[str, Any] = {"model": subject.name, "temperature": 0, "max_tokens": NEW_TOKENS}
    ids = judges.encode(tokenizer, PROMPTS[0])
    expected = continue_text(tokenizer, model, ids)
    with (
        start_server(subject) as address,
        OpenAI(base_url=address, api_key="none", max_retries=0) as client,
    ):
        require(
            [entry.id for entry in client.models.list()] == [subject.name], "the list of models"
        )
        completion = client.completions.create(prompt=PROMPTS[0], **settings)
        require(
            completion.choices[0].text == expected,
            f"{completion.choices[0].text!r}, not {expected!r}",
        )
        require(
            completion.usage is not None and completion.usage.prompt_tokens == len(ids),
            "usage of a completion",
        )
        if tokenizer.chat_template is None:
            return "a completion; the model has no chat template"
        for tools in (None, TOOLS):
            check_chat(client, tokenizer, model, settings, tools)
    return "a completion, chats with and without tools, streamed and not"


def check_chat(
    client: Any, tokenizer: Any, model: Any, settings: dict[str, Any], tools: Any
) -> None:
    """Compare one conversation, streamed and not, with transformers' template and greedy text."""
    prompt = tokenizer.apply_chat_template(
        MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True
    )
    ids = judges.encode(tokenizer, prompt, specials=False)
    expected = continue_text(tokenizer, model, ids).strip()
    options = {**settings, "messages": MESSAGES}
    if tools is not None and "tools" in tokenizer.chat_template:
        options["tools"] = tools
    answer = client.chat.completions.create(**options)
    counted = answer.usage.prompt_tokens
    require(
        counted == len(ids),
        f"tools {tools is not None}: {counted} tokens of the prompt, not {len(ids)}",
    )
    content = answer.choices[0].message.content or ""
    if answer.choices[0].message.tool_calls is None:
        require(content.strip() == expected, f"{content!r}, not {expected!r}")
    parts = []
    for event in client.chat.completions.create(**options, stream=True):
        for choice in event.choices:
            parts.append(choice.delta.content or "")
    require("".join(parts) == content, f"streamed {''.join(parts)!r}, not {content!r}")


# Published tokenizers, on a tiny random model of their family


def attach_tokenizer(subject: Subject) -> Path:
    """Write a tiny random model with the tokenizer's files, and return its folder."""
    folder = subject.path("folder")
    remove(folder)
    settings = judges.read_json(subject.source / "tokenizer_config.json")
    tokenizer = judges.transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(subject.source / "tokenizer.json")
    )
    ids = {}
    for kind in ("bos", "eos", "pad"):
        token = settings.get(f"{kind}_token")
        text = token["content"] if isinstance(token, dict) else token
        ids[f"{kind}_token_id"] = None if text is None else tokenizer.convert_tokens_to_ids(text)
    rows = -(-len(tokenizer) // 64) * 64 + 64  # published models pad their embedding
    # llama.cpp scales attention by the width of a head, as published models of these sizes do.
    gemma = {"query_pre_attn_scalar": 16} if FAMILIES[subject.name].startswith("gemma") else {}
    config = judges.transformers.AutoConfig.for_model(
        FAMILIES[subject.name],
        vocab_size=rows,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **gemma,
        **ids,
    )
    torch.manual_seed(0)
    judges.transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16
    ).save_pretrained(folder)
    for file in subject.source.glob("*.json"):
        shutil.copy(file, folder)
    return folder


def convert_tokenizer(subject: Subject) -> str:
    """Convert a model with the tokenizer to GGUF: llama.cpp must load it, and stop at the same
    token.
    """
    folder, file = attach_tokenizer(subject), subject.path("model.gguf")
    run_quantkit(subject, "convert", folder, file, "--no-source-check", output=file)
    eos = judges.load_tokenizer(folder).eos_token_id
    with open_llama_cpp(subject, file) as peer:
        ends = peer.request(ends=True)
    require(eos in ends, f"llama.cpp stops at {ends}, not at {eos}")
    return f"llama.cpp stops at {ends}"


def compare_tokenizer_with_llama_cpp(subject: Subject) -> str:
    """Compare llama.cpp's tokens of the file with transformers' of the folder."""
    return compare_tokens_with_llama_cpp(
        subject, subject.path("folder"), subject.path("model.gguf")
    )


def convert_tokenizer_back(subject: Subject) -> str:
    """Convert to GGUF and back, and from folder to folder: tokens, texts and prompts must be
    transformers'.
    """
    folder = subject.path("folder")
    outputs = [subject.path("back"), subject.path("copy")]
    for source, output in zip((subject.path("model.gguf"), folder), outputs, strict=True):
        run_quantkit(subject, "convert", source, output, "--no-source-check", output=output)
    original = judges.load_tokenizer(folder)
    spelled = [f"a{token} {token}b" for token in list(original.get_added_vocab())[:40]]
    require(len(spelled) > 0, "the tokenizer has no added tokens")
    lines = [*judges.load_texts(subject.settings.texts), *spelled]
    expected = [judges.encode(original, line) for line in lines]
    expected_texts = [original.decode(ids, clean_up_tokenization_spaces=False) for ids in expected]
    for output in outputs:
        tokenizer = judges.load_tokenizer(output)
        rows = [judges.encode(tokenizer, line) for line in lines]
        differences = judges.describe_differences(lines, rows, expected)
        require(not differences, f"{output.name}: tokens: {differences}")
        decoded = [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in expected]
        differences = judges.describe_differences(lines, decoded, expected_texts)
        require(not differences, f"{output.name}: texts: {differences}")
        compare_prompts(original, tokenizer)
    return f"{len(lines)} strings, {'prompts' if original.chat_template else 'no chat template'}"


def compare_prompts(original: Any, tokenizer: Any) -> None:
    """Compare the prompts of a conversation, with and without tools."""
    if original.chat_template is None:
        require(tokenizer.chat_template is None, "a chat template came from nowhere")
        return
    for tools in (None, TOOLS):
        options = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
        expected = original.apply_chat_template(MESSAGES, **options)
        prompt = tokenizer.apply_chat_template(MESSAGES, **options)
        require(prompt == expected, f"prompt {prompt[:80]!r}, not {expected[:80]!r}")


def compare_tokenizer_with_own(subject: Subject) -> str:
    """Compare quantkit's tokens of the folder and of the file with transformers'."""
    folder = subject.path("folder")
    tokenizer = judges.load_tokenizer(folder)
    spelled = [f"a{token} b" for token in list(tokenizer.get_added_vocab())[:40]]
    lines = [*judges.load_texts(subject.settings.texts), *spelled]
    for path in (folder, subject.path("model.gguf")):
        compare_own_tokens(path, folder, lines)
    return f"{len(lines)} strings, of the folder and of the file"


def verify_tokenizer(subject: Subject) -> str:
    """Require that `verify` finds the model in its file and in the folder made of that."""
    for output in (subject.path("model.gguf"), subject.path("back")):
        run_quantkit(subject, "verify", subject.path("folder"), output)
    return "the file and the folder made of it"


MODEL_JOBS = [
    Job("inspect", "gguf", inspect_file),
    Job("convert to folder", "transformers", convert_to_folder),
    Job("tokens", "llama.cpp, transformers", compare_tokens, ("convert to folder",)),
    Job("end tokens", "gguf, llama.cpp", check_end_tokens, ("convert to folder",)),
    Job("convert to GGUF", "gguf, llama.cpp", convert_back, ("convert to folder",)),
    Job("doctor", "transformers", check_doctor, ("convert to folder",)),
    Job("int8", "transformers", quantize_to_folder("int8"), ("convert to folder",)),
    Job("int4-g64", "transformers", quantize_to_folder("int4-g64"), ("convert to folder",)),
    Job("int4-g128", "transformers", quantize_to_folder("int4-g128"), ("convert to folder",)),
    Job("fp8", "transformers", quantize_to_folder("fp8"), ("convert to folder",)),
    Job("q8_0", "gguf, llama.cpp", quantize_to_file("q8_0"), ("convert to folder",)),
    Job("q4_k_m", "gguf, llama.cpp", quantize_to_file("q4_k_m"), ("convert to folder",)),
    Job("five formats", "transformers, torch", write_formats, ("convert to folder",)),
    Job("refine", "transformers", refine, ("convert to folder", "five formats")),
    Job("LoRA", "PEFT", merge_lora, ("convert to folder",)),
    Job("verify", "torch", check_verify, ("convert to folder", "convert to GGUF", "int8")),
    Job("eval", "transformers", evaluate, ("convert to folder",)),
    Job("generate", "transformers", generate, ("convert to folder",)),
    Job("serve", "transformers, openai", serve, ("convert to folder",)),
]
TOKENIZER_JOBS = [
    Job("tokenizer to GGUF", "llama.cpp", convert_tokenizer),
    Job(
        "tokenizer in llama.cpp",
        "llama.cpp",
        compare_tokenizer_with_llama_cpp,
        ("tokenizer to GGUF",),
    ),
    Job("tokenizer back", "transformers", convert_tokenizer_back, ("tokenizer to GGUF",)),
    Job("tokenizer's tokens", "transformers", compare_tokenizer_with_own, ("tokenizer to GGUF",)),
    Job(
        "tokenizer's verify", "quantkit", verify_tokenizer, ("tokenizer to GGUF", "tokenizer back")
    ),
]


def free_memory() -> None:
    """Free the models of a finished job before the next one loads its own."""
    gc.collect()
