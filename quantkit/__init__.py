"""Convert, quantize, verify and run Llama-family language models.

Folders go in and come out, as Meta or Hugging Face publish them. quantkit never gives out a broken
model: what is wrong is raised, as one of the kinds of `QuantkitError` in `quantkit.errors`.

Make and check models:

    inspect          say what lies in a folder, from headers alone
    convert          write a model in another format, sharding or float type
    quantize         write a model with linear layers in int8 or int4
    refine           train a quantized model's scales against its float model
    apply_delta      write a quantized model with what `refine` changed
    plan.convert     say what `convert` would take: memory, disk and time
    plan.quantize    say what `quantize` would take
    plan.refine      say what `refine` would take
    plan.generate    say what generation takes of each chip of a TPU slice
    verify           say whether two models are the same, or how far apart
    diagnose         say what is wrong with anybody's folder, and what a runtime would mind
    push             send a model to a repository of a model hub, checked and compared
    evaluate         measure models: perplexity, divergence, tasks, speed
    bench            measure the speed of models: prefill, decoding, loading, memory

Run them:

    load             a model and its tokenizer
    stream           continue a prompt, piece of text by piece of text
    generate         continue a prompt, token id by token id
    generate_batch   continue many prompts, several at a time
    generate_file    continue the prompts in a file, into a file
    Llama            the interface of Meta's own code, for scripts that use it
    open_checkpoint  the tensors of a folder, one at a time

Talk with instruct models:

    ChatSession        a conversation, answer by answer
    chat_format        chat templates: messages to token ids
    sampling_defaults  how its makers advise to draw tokens

All take paths as `str` or `Path`, float types as "bf16", "bfloat16" or torch's, and memory in
bytes. Jobs report to a `Progress`. Their results, such as a `VerifyReport`, have `to_json()`, which
returns all of it as plain values, and most has `lines()` for people; `help(quantkit.VerifyReport)`
says what it holds.

    >>> import quantkit
    >>> quantkit.quantize("model", "model-int4", "int4-g128")
    >>> model, tokenizer = quantkit.load("model-int4")
    >>> for piece in quantkit.stream(model, tokenizer, "My fellow citizens"):
    ...     print(piece, end="", flush=True)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quantkit.version import __version__

if TYPE_CHECKING:
    from quantkit import errors as errors
    from quantkit.base.progress import Progress as Progress
    from quantkit.doctor.diagnose import diagnose as diagnose
    from quantkit.doctor.findings import Diagnosis as Diagnosis
    from quantkit.evals.bench import BenchModel as BenchModel
    from quantkit.evals.bench import bench as bench
    from quantkit.evals.bench_result import Bench as Bench
    from quantkit.evals.bench_result import BenchResult as BenchResult
    from quantkit.evals.evaluate import evaluate as evaluate
    from quantkit.evals.results import Evaluation as Evaluation
    from quantkit.formats.detect import open_checkpoint as open_checkpoint
    from quantkit.jobs import plan as plan
    from quantkit.jobs.convert.convert import convert as convert
    from quantkit.jobs.inference.generate_file import GeneratedFile as GeneratedFile
    from quantkit.jobs.inference.generate_file import generate_file as generate_file
    from quantkit.jobs.inference.llama import Llama as Llama
    from quantkit.jobs.inference.load import load as load
    from quantkit.jobs.inspect import Inspection as Inspection
    from quantkit.jobs.inspect import inspect as inspect
    from quantkit.jobs.output.estimate import Estimate as Estimate
    from quantkit.jobs.output.result import ConvertResult as ConvertResult
    from quantkit.jobs.output.result import QuantizeResult as QuantizeResult
    from quantkit.jobs.push.push import push as push
    from quantkit.jobs.push.result import PushResult as PushResult
    from quantkit.jobs.quantize.imatrix import ImatrixResult as ImatrixResult
    from quantkit.jobs.quantize.imatrix import imatrix as imatrix
    from quantkit.jobs.quantize.quantize import quantize as quantize
    from quantkit.jobs.refine.apply_delta import apply_delta as apply_delta
    from quantkit.jobs.refine.refine import refine as refine
    from quantkit.jobs.refine.result import RefineResult as RefineResult
    from quantkit.quality.gate import Gate as Gate
    from quantkit.quality.manifest_check import FolderReport as FolderReport
    from quantkit.quality.verify import Verdict as Verdict
    from quantkit.quality.verify import VerifyReport as VerifyReport
    from quantkit.quality.verify import verify as verify
    from quantkit.runtime.chat_session import ChatSession as ChatSession
    from quantkit.runtime.generate import generate as generate
    from quantkit.runtime.generate import stream as stream
    from quantkit.runtime.generate_batch import generate_batch as generate_batch
    from quantkit.runtime.generation_config import sampling_defaults as sampling_defaults
    from quantkit.runtime.request import Completion as Completion
    from quantkit.runtime.request import Logprobs as Logprobs
    from quantkit.runtime.sampling_params import SamplingParams as SamplingParams
    from quantkit.tensors.recipe import Override as Override
    from quantkit.tensors.recipe import Recipe as Recipe
    from quantkit.tensors.scheme import QuantScheme as QuantScheme
    from quantkit.text.chat import chat_format as chat_format
    from quantkit.text.tokenizer import Tokenizer as Tokenizer

_JOBS = {
    "ChatSession": "quantkit.runtime.chat_session",
    "Llama": "quantkit.jobs.inference.llama",
    "Progress": "quantkit.base.progress",
    "Tokenizer": "quantkit.text.tokenizer",
    "apply_delta": "quantkit.jobs.refine.apply_delta",
    "bench": "quantkit.evals.bench",
    "chat_format": "quantkit.text.chat",
    "convert": "quantkit.jobs.convert.convert",
    "diagnose": "quantkit.doctor.diagnose",
    "evaluate": "quantkit.evals.evaluate",
    "generate": "quantkit.runtime.generate",
    "generate_batch": "quantkit.runtime.generate_batch",
    "generate_file": "quantkit.jobs.inference.generate_file",
    "imatrix": "quantkit.jobs.quantize.imatrix",
    "inspect": "quantkit.jobs.inspect",
    "load": "quantkit.jobs.inference.load",
    "open_checkpoint": "quantkit.formats.detect",
    "push": "quantkit.jobs.push.push",
    "quantize": "quantkit.jobs.quantize.quantize",
    "refine": "quantkit.jobs.refine.refine",
    "sampling_defaults": "quantkit.runtime.generation_config",
    "stream": "quantkit.runtime.generate",
    "verify": "quantkit.quality.verify",
}
_TYPES = {
    "Bench": "quantkit.evals.bench_result",
    "BenchModel": "quantkit.evals.bench",
    "BenchResult": "quantkit.evals.bench_result",
    "Completion": "quantkit.runtime.request",
    "ConvertResult": "quantkit.jobs.output.result",
    "Diagnosis": "quantkit.doctor.findings",
    "Estimate": "quantkit.jobs.plan",
    "Evaluation": "quantkit.evals.results",
    "FolderReport": "quantkit.quality.manifest_check",
    "Gate": "quantkit.quality.gate",
    "GeneratedFile": "quantkit.jobs.inference.generate_file",
    "ImatrixResult": "quantkit.jobs.quantize.imatrix",
    "Inspection": "quantkit.jobs.inspect",
    "Logprobs": "quantkit.runtime.request",
    "Override": "quantkit.tensors.recipe",
    "PushResult": "quantkit.jobs.push.result",
    "QuantScheme": "quantkit.tensors.scheme",
    "QuantizeResult": "quantkit.jobs.output.result",
    "Recipe": "quantkit.tensors.recipe",
    "RefineResult": "quantkit.jobs.refine.result",
    "SamplingParams": "quantkit.runtime.sampling_params",
    "Verdict": "quantkit.quality.verify",
    "VerifyReport": "quantkit.quality.verify",
}
_MODULES = {"errors": "quantkit.errors", "plan": "quantkit.jobs.plan"}

# Without the types: pydoc shows all that is named here in full, and of a dataclass that is mostly
# its machinery.
__all__ = ["__version__", *_JOBS, *_MODULES]


def __getattr__(name: str) -> Any:
    """Import torch only when something is used."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    module = _JOBS.get(name) or _TYPES.get(name)
    if module is None:
        raise AttributeError(f"module 'quantkit' has no attribute '{name}'")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_TYPES])
