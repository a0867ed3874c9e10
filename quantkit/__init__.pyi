"""The public names of quantkit: `__init__.py` reads this file and imports each when it is used."""

from quantkit import errors as errors
from quantkit.base.progress import Progress as Progress
from quantkit.doctor.diagnose import diagnose as diagnose
from quantkit.doctor.findings import Diagnosis as Diagnosis
from quantkit.evals.bench import BenchModel as BenchModel
from quantkit.evals.bench import bench as bench
from quantkit.evals.bench_result import Bench as Bench
from quantkit.evals.bench_results import BenchResult as BenchResult
from quantkit.evals.evaluate import evaluate as evaluate
from quantkit.evals.evaluation import Evaluation as Evaluation
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
from quantkit.quality.gate_result import Gate as Gate
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
from quantkit.version import __version__ as __version__

# What `help(quantkit)` shows in full: of a dataclass that would be mostly its machinery.
__all__ = [
    "ChatSession",
    "Llama",
    "Progress",
    "Tokenizer",
    "__version__",
    "apply_delta",
    "bench",
    "chat_format",
    "convert",
    "diagnose",
    "errors",
    "evaluate",
    "generate",
    "generate_batch",
    "generate_file",
    "imatrix",
    "inspect",
    "load",
    "open_checkpoint",
    "plan",
    "push",
    "quantize",
    "refine",
    "sampling_defaults",
    "stream",
    "verify",
]
