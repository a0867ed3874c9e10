"""Compare the size of a quantized model's files of weights with the source's, and tell what would
make them smaller.
"""

from __future__ import annotations

from quantkit.architectures.names import EMBEDDING
from quantkit.formats.codecs.codec import Reason
from quantkit.formats.container import count_stored_bytes
from quantkit.jobs.output.sizes import WeightSizes
from quantkit.jobs.quantize.formats import FormatPlan
from quantkit.tensors.scheme import EMBEDDING_SCHEME
from quantkit.tensors.spec import TensorSpec


def weight_sizes(plan: FormatPlan, output_bytes: int) -> WeightSizes:
    """Compute the sizes for a planned output with files of weights of `output_bytes`."""
    source = plan.source
    codes = plan.target.codes
    assert codes is not None
    source_bytes = 0
    # Among the files of a checkpoint, JSON is the config or an index, not weights.
    for file in source.files():
        if file.path.suffix != ".json":
            source_bytes += file.size
    if not source.config.runnable:
        return WeightSizes(source_bytes, output_bytes, 0, None)
    embedding = next(spec for spec in plan.output.planned if spec.name == f"{EMBEDDING}.weight")
    codec = codes.codec(EMBEDDING_SCHEME, embedding=True)
    int8_bytes = None
    # A large vocabulary may be most of a small model: the size with an int8 embedding is a hint.
    if embedding.scheme is None and not isinstance(codec, Reason):
        scale_dtype = codes.scale_dtype or embedding.dtype
        int8 = TensorSpec(embedding.name, embedding.shape, scale_dtype, EMBEDDING_SCHEME)
        int8_bytes = count_stored_bytes(int8, codes)
    return WeightSizes(
        source_bytes,
        output_bytes,
        count_stored_bytes(embedding, codes),
        int8_bytes,
    )
