"""Judge quantkit's results for `real_models.py` by transformers, the gguf package, llama.cpp and
plain torch.

No function uses quantkit's own readers: what it wrote is opened as users of the other tools open
it.
"""

from __future__ import annotations

import json
import os
import unicodedata
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from peer_gguf import Theirs
from peer_gguf_tokenizer import PIECES, texts
from safetensors.torch import load_file
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

WINDOW = 256  # what the gate measures on, so that its figures can be compared
WINDOWS_PER_TEXT = 2
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # places of eight consecutive outputs in a word


class CheckFailed(Exception):
    """A judge and quantkit disagree."""


def silence_transformers() -> None:
    """Turn off the bars and warnings of transformers, and requests to the hub, in this process and
    those it starts.

    It is called by the script alone: a test that imports this module shares its environment with
    all other tests.
    """
    for setting, value in (
        ("HF_HUB_OFFLINE", "1"),
        ("TQDM_DISABLE", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ):
        os.environ.setdefault(setting, value)
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # it was read from the environment at import
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def require(condition: bool, message: str) -> None:
    """Raise `CheckFailed` with a message unless a condition is true."""
    if not condition:
        raise CheckFailed(message)


# Texts


def load_texts(count: int) -> list[str]:
    """Return lines of running text, at most half of all, then random strings; none spells a
    control token.
    """
    lines = load_lines()[: count // 2]
    return [*lines, *load_random_strings(count - len(lines))]


def load_lines() -> list[str]:
    """Return the lines of running text, code and markup that ship with quantkit."""
    from quantkit.data.files import gate_texts

    lines = "\n".join(reversed(gate_texts().values())).splitlines()
    return [line for line in lines if line.strip()]


def load_random_strings(count: int) -> list[str]:
    """Return random strings of letters and marks of many scripts."""
    strings: list[str] = []
    seed = 0
    while len(strings) < count:
        strings += texts([], PIECES, seed)
        seed += 1
    return strings[:count]


def normalize(lines: Sequence[str]) -> list[str]:
    """Return lines in NFC: llama.cpp does not normalize, but Qwen's tokenizer.json does."""
    return [unicodedata.normalize("NFC", line) for line in lines]


def describe_differences(
    lines: Sequence[str], rows: Sequence[object], expected: Sequence[object]
) -> str:
    """Return how many rows differ from the expected ones and the first such line, or an empty
    string for none.
    """
    differing = []
    for line, row, expected_row in zip(lines, rows, expected, strict=True):
        if row != expected_row:
            differing.append((line, row, expected_row))
    if not differing:
        return ""
    line, row, expected_row = differing[0]
    return (
        f"{len(differing)} of {len(lines)} differ, first {line[:40]!r}: {str(row)[:60]} not"
        f" {str(expected_row)[:60]}"
    )


# transformers


def load_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a folder or a GGUF file as a user of transformers does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if path.suffix == ".gguf":
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=dtype
            )
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.eval()


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Return a folder's tensors as transformers computes with them."""
    model = load_model(folder)
    with torch.inference_mode():
        # Compressed-tensors decompresses weights when the model first runs.
        model(torch.tensor([[1, 2]]))
    return {name: value.detach() for name, value in model.state_dict().items()}


def find_missing_tensors(folder: Path) -> set[str]:
    """Return the parameters that transformers does not find in a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
    return set(report["missing_keys"])


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder with transformers, as its files state it.

    For Llama's class, transformers 5 replaces what tokenizer.json states: a text that begins with a
    space loses it, and ``add_bos_token`` is ignored. sentencepiece and llama.cpp do what the files
    state, and so did transformers 4.
    """
    settings = read_json(folder / "tokenizer_config.json")
    if str(settings.get("tokenizer_class")).removesuffix("Fast") != "LlamaTokenizer":
        return transformers.AutoTokenizer.from_pretrained(str(folder))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    if settings.get("add_bos_token") is True and not tokenizer("")["input_ids"]:
        tokenizer.add_bos_token = True
    return tokenizer


def encode(tokenizer: Any, line: str, *, specials: bool = True) -> list[int]:
    """Return the token ids of a string."""
    return list(tokenizer(line, add_special_tokens=specials)["input_ids"])


def cut_windows(tokenizer: Any) -> Tensor:
    """Return the gate's windows [N, WINDOW] of its two texts, each with what the tokenizer puts
    before a prompt.
    """
    from quantkit.data.files import gate_texts

    prefix = encode(tokenizer, "")
    body = WINDOW - len(prefix)
    windows = []
    for text in gate_texts().values():
        ids = encode(tokenizer, text, specials=False)
        for number in range(WINDOWS_PER_TEXT):
            windows.append([*prefix, *ids[number * body : (number + 1) * body]])
    return torch.tensor(windows)


@torch.inference_mode()
def compute_log_probabilities(model: Any, window: Tensor) -> Tensor:
    """Return log-probabilities [T, V] of one window [T]."""
    return torch.log_softmax(model(window.unsqueeze(0), use_cache=False).logits[0].float(), -1)


def average_kl(expected: Tensor, actual: Tensor) -> float:
    """Return the mean KL(expected || actual) in nats per position of log-probabilities [T, V]."""
    width = min(expected.shape[-1], actual.shape[-1])  # padded rows may be missing
    expected, actual = expected[:, :width], actual[:, :width]
    return float((expected.exp() * (expected - actual)).sum(-1).mean())


def measure_kl(reference: Any, model: Any, windows: Tensor) -> float:
    """Return the mean KL(reference || model) of two models of transformers over windows [N, T]."""
    values = []
    for window in windows:
        expected = compute_log_probabilities(reference, window)
        values.append(average_kl(expected, compute_log_probabilities(model, window)))
    return sum(values) / len(values)


def measure_perplexity(model: Any, ids: Sequence[int], window: int) -> float:
    """Return the perplexity of whole windows of token ids; the first token of each is not
    predicted.
    """
    losses = []
    for start in range(0, len(ids) - window + 1, window):
        tokens = torch.tensor(ids[start : start + window])
        predicted = compute_log_probabilities(model, tokens)[:-1]
        losses.append(-predicted.gather(-1, tokens[1:].unsqueeze(-1)).squeeze(-1))
    return float(torch.cat(losses).mean().exp())


def continue_greedily(model: Any, ids: Sequence[int], count: int) -> list[int]:
    """Return the likeliest continuation, without the end token, as transformers generates it."""
    output = model.generate(
        torch.tensor([list(ids)]),
        max_new_tokens=count,
        do_sample=False,
        repetition_penalty=1.0,
        pad_token_id=0,
    )
    new_ids: list[int] = output[0, len(ids) :].tolist()
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if new_ids and new_ids[-1] in ends:
        new_ids.pop()
    return new_ids


@torch.no_grad()
def round_linears(model: Any, group_size: int) -> None:
    """Round all linears but the head to symmetric int4 in groups, to nearest, in place.

    Groups are halved until they divide a row, as `quantize` does.
    """
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        size = group_size
        while module.in_features % size:
            size //= 2
        groups = module.weight.reshape(-1, size)
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
        module.weight.copy_(
            (groups / scale).round().clamp(-8, 7).mul(scale).reshape(module.weight.shape)
        )


# GGUF files


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a file with the gguf package: its metadata, and its tensors by name."""
    import gguf

    reader = gguf.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def dequantize_gguf(tensor: Any) -> Tensor:
    """Return the numbers of one of the gguf package's tensors, in its own order of rows."""
    import gguf

    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(values).reshape(list(reversed(tensor.shape.tolist())))


def start_llama_cpp(python: Path, file: Path) -> Theirs:
    """Load a file with llama.cpp in another process."""
    return Theirs(python, file)


def measure_kl_of_file(reference: Any, peer: Theirs, windows: Tensor) -> float:
    """Return the mean KL(reference || file) over windows [N, T], the file computed by llama.cpp."""
    values = []
    for window in windows:
        expected = compute_log_probabilities(reference, window)
        logits = torch.from_numpy(peer.logits(window.tolist()))
        values.append(average_kl(expected, torch.log_softmax(logits.float(), -1)))
    return sum(values) / len(values)


# Folders of other formats, unpacked by their published layouts


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all safetensors files of a folder."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def unpack_words(words: Tensor, places: Sequence[int] = range(8), bits: int = 4) -> Tensor:
    """Unpack the codes of each int32 along the last axis: code n lies at place places[n]."""
    shifts = torch.tensor([bits * place for place in places])
    codes = (words.long().unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.flatten(-2)


def unpack_gptq(tensors: dict[str, Tensor], module: str) -> Tensor:
    """Return the weight [out, in] of a GPTQ module of version 1, whose stored zero points are
    one too small.
    """
    codes = unpack_words(tensors[f"{module}.qweight"].t())
    zeros = unpack_words(tensors[f"{module}.qzeros"]).t() + 1
    scales = tensors[f"{module}.scales"].float().t()
    if f"{module}.g_idx" in tensors:
        group = tensors[f"{module}.g_idx"].long()
    else:
        group = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    return (codes - zeros[:, group]) * scales[:, group]


def unpack_awq(tensors: dict[str, Tensor], module: str) -> Tensor:
    """Return the weight [out, in] of an AWQ module in its layout for GEMM."""
    places = [AWQ_ORDER.index(output) for output in range(8)]
    codes = unpack_words(tensors[f"{module}.qweight"], places)
    zeros = unpack_words(tensors[f"{module}.qzeros"], places)
    scales = tensors[f"{module}.scales"].float()
    size = codes.shape[0] // scales.shape[0]
    return ((codes - zeros.repeat_interleave(size, 0)) * scales.repeat_interleave(size, 0)).t()


def unpack_mlx(tensors: dict[str, Tensor], module: str, bits: int = 4) -> Tensor:
    """Return the weight [out, in] of a module that MLX has quantized: code * scale + bias."""
    words = tensors[f"{module}.weight"].view(torch.int32)
    codes = unpack_words(words, range(32 // bits), bits)
    scales, biases = tensors[f"{module}.scales"].float(), tensors[f"{module}.biases"].float()
    size = codes.shape[1] // scales.shape[1]
    return codes * scales.repeat_interleave(size, 1) + biases.repeat_interleave(size, 1)


UNPACKERS = {"gptq": unpack_gptq, "awq": unpack_awq, "mlx": unpack_mlx}
QUANTIZED_TENSOR = {"gptq": ".qweight", "awq": ".qweight", "mlx": ".scales"}


def measure_relative_error(weight: Tensor, reference: Tensor) -> float:
    """Return the norm of a difference from reference weights, relative to theirs."""
    return float((weight.float() - reference.float()).norm() / reference.float().norm())


def compare_unpacked(
    format_name: str, folder: Path, rounded: dict[str, Tensor], floats: dict[str, Tensor]
) -> int:
    """Compare the error of every quantized module of a folder with that of other codes; return how
    many there are.

    Codes may differ between formats: GPTQ and AWQ have no negative scales.

    Args:
        rounded: the weights that compressed-tensors means.
        floats: the weights before rounding.
    """
    tensors = load_tensors(folder)
    suffix = QUANTIZED_TENSOR[format_name]
    modules = [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    settings = read_json(folder / "config.json").get("quantization", {})
    for module in modules:
        reference = floats[f"{module}.weight"]
        bound = 1.1 * measure_relative_error(rounded[f"{module}.weight"], reference)
        # MLX states a module's own bits, as those of an embedding.
        bits = settings.get(module, {}).get("bits")
        if format_name == "mlx" and bits is not None:
            weight = unpack_mlx(tensors, module, bits)
            # compressed-tensors keeps an embedding in floats. Of normal weights, whose groups reach
            # to some four standard deviations, this is about twice the error.
            bound = max(bound, 5 / 2**bits)
        else:
            weight = UNPACKERS[format_name](tensors, module)
        error = measure_relative_error(weight, reference)
        require(
            error <= bound,
            f"{format_name}: {module} has an error of {error:.3g}, bound {bound:.3g}",
        )
    require(len(modules) > 0, f"{format_name}: no quantized module in {folder}")
    return len(modules)


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))
