"""List the packages of quantkit, from the lowest to the highest level, and which may import which.

`tests/test_imports.py` checks imports against this list. Without arguments, the script prints the
list as Markdown; with ``--write``, it updates the list in docs/architecture.md.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"


class Room(NamedTuple):
    """A package or module: its name below ``quantkit``, and a sentence in Markdown without its
    subject, which is the name.
    """

    name: str
    description: str


# The levels, from the lowest. A room may import the rooms of its own level and of lower ones. A
# module belongs to the room with the longest name that matches.
ROOMS = (
    (
        Room("version", "defines the version number."),
        Room("base.messages", "represents option names in messages as data."),
    ),
    (Room("errors", "defines the errors that users see, and their exit codes."),),
    (
        Room(
            "base",
            "checks arguments, parses JSON, declares options, and reports progress.",
        ),
    ),
    (
        Room("data", "locates the texts and the demo model that ship with quantkit."),
        Room(
            "architectures",
            "describes models without torch: config, families, names and topology.",
        ),
        Room(
            "tensors",
            "defines dtypes, quantization schemes, recipes and `QuantTensor`.",
        ),
    ),
    (
        Room(
            "files",
            "reads, writes, downloads and uploads safetensors, `.pth` and GGUF files.",
        ),
        Room("solver", "implements GPTQ, rounding and scale search on plain tensors."),
    ),
    (
        Room(
            "text",
            "loads, compares and exports tokenizers, and renders chat templates.",
        ),
    ),
    (
        Room("formats.authorship", "reads and writes license and author metadata."),
        Room("formats.checkpoint", "defines the reader interface, `Checkpoint`."),
        Room("formats.codecs", "encodes and decodes one quantized linear per storage layout."),
        Room("formats.kv_cache", "copies or drops KV cache scales."),
    ),
    (
        Room("formats.container", "defines the container interface: detect, open and write."),
        Room("formats.folder", "finds side files, such as tokenizer and license."),
        Room("formats.kv_scales", "defines the FP8 KV cache scheme."),
    ),
    (
        Room("formats.containers", "reads and writes Meta, Hugging Face and gpt-fast folders."),
        Room("formats.gguf", "reads and writes GGUF models."),
        Room("formats.output", "writes an output atomically, with a journal."),
    ),
    (Room("formats", "detects formats, merges LoRA adapters (`lora/`), and reads manifests."),),
    (
        Room(
            "kernels",
            "multiplies by quantized weights, in C++ for CPUs and in Triton for GPUs.",
        ),
        Room(
            "distributed",
            "manages process groups and checkpoint shards ([parallel.md](parallel.md)).",
        ),
    ),
    (
        Room(
            "model",
            "implements the decoder and loads it from a checkpoint.",
        ),
    ),
    (Room("passes", "runs models part by part, forward in lockstep and backward."),),
    (
        Room(
            "via_transformers",
            "runs models that lack a decoder through transformers.",
        ),
    ),
    (
        Room(
            "quality",
            "measures perplexity and divergence, and implements the gate and `verify`.",
        ),
        Room(
            "runtime",
            "generates text: engine, scheduler, sampling, speculative decoding.",
        ),
        Room(
            "calibration",
            "quantizes blocks on calibration samples.",
        ),
    ),
    (
        Room("bit_allocation", "selects a scheme for each layer that fits a target size."),
        Room("training", "trains scales, codes and norms of a quantized model."),
    ),
    (Room("grammar", "compiles JSON schemas to grammars and token masks."),),
    (Room("answers", "splits an answer into reasoning, content and tool calls."),),
    (Room("prompts", "encodes prompts of any protocol and checks them against a model."),),
    (Room("openai", "parses requests of OpenAI's API, and formats responses, as JSON."),),
    (
        Room(
            "xla",
            "compiles inference and training with XLA for TPUs, only on request.",
        ),
    ),
    (
        Room("jobs.output", "provides the writer, results and estimates that other jobs share."),
        Room("jobs.inspect", "describes a checkpoint from its headers."),
        Room("jobs.inference", "loads a model and runs prompts from Python and from files."),
        Room("doctor", "finds faults in any model folder by [rules](doctor.md)."),
    ),
    (
        Room("jobs.convert", "converts a checkpoint to another format, sharding or dtype."),
        Room("jobs.push", "uploads a model to a hub."),
    ),
    (Room("jobs.refine", "trains the scales of a quantized model, and applies deltas."),),
    (Room("jobs.quantize", "quantizes a checkpoint."),),
    (Room("jobs.plan", "estimates the memory, disk space and time of jobs."),),
    (Room("jobs", "contains the job packages."),),
    (
        Room(
            "evals",
            "implements `eval`, `bench`, `demo` and the HTML report.",
        ),
        Room("serve", "serves a model over OpenAI's HTTP API, with a web page and a client."),
    ),
    (Room("cli", "parses options, calls one job per command, and prints the result."),),
)

# Packages and modules that may import less than their level allows.
ONLY = {
    "quantkit.architectures": {"errors", "base", "base.messages", "architectures"},
    "quantkit.tensors": {"errors", "base", "base.messages", "tensors"},
    "quantkit.text": {"errors", "base", "base.messages", "text", "files"},
    "quantkit.kernels": {"errors", "base", "base.messages", "tensors", "kernels"},
    "quantkit.solver": {"errors", "tensors", "solver"},
    "quantkit.model.decoder": {"architectures", "distributed", "model"},
    "quantkit.model.attention": {"model", "tensors"},
    "quantkit.model.cache": {"architectures", "model", "tensors"},
    "quantkit.model.rope": {"architectures"},
    "quantkit.base.messages": {"base.messages"},
    "quantkit.base.json_values": {"errors", "base", "base.messages"},
    "quantkit.base.arguments": {"errors", "base", "base.messages"},
    "quantkit.base.patterns": {"errors", "base", "base.messages"},
}

MODULE_LIMITS = {"--help": 47, "quantize": 262, "generate": 166, "serve": 225}
"""The largest number of the package's modules that each command imports for a Llama in safetensors
and its int4 copy on a CPU, and three more, for new files; what only other models and options need
is imported late.
"""

_BEGIN, _END = "<!-- rooms -->\n", "<!-- /rooms -->"
_SECTION = re.compile(f"(?<={_BEGIN}).*?(?={_END})", re.DOTALL)


def build_list() -> str:
    """Return a numbered Markdown list with one item per level."""
    lines = []
    for level, rooms in enumerate(ROOMS, start=1):
        sentences = [f"`{room.name}` {room.description}" for room in rooms]
        lines.append(f"{level}. {' '.join(sentences)}")
    return "\n".join(lines) + "\n"


def update_page(page: str) -> str:
    """Return a page's text with the current list between the two marks.

    Raises:
        ValueError: if the page does not have the marks.
    """
    if not _SECTION.search(page):
        raise ValueError(f"{PAGE}: the marks {_BEGIN.strip()} and {_END} are missing")
    # A function, because `sub` would interpret backslashes in a string.
    return _SECTION.sub(lambda _: build_list(), page, count=1)


def main() -> None:
    """Print the list, or write it to the page."""
    parser = argparse.ArgumentParser(description="List the packages of quantkit by level.")
    parser.add_argument("--write", action="store_true", help="update docs/architecture.md")
    if parser.parse_args().write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(update_page(page), encoding="utf-8")
    else:
        print(build_list(), end="")


if __name__ == "__main__":
    main()
