"""The size of a quantized model's files of weights, compared with the source's, and what would
make them smaller.
"""

from __future__ import annotations

from quantkit.architectures.names import EMBEDDING
from quantkit.bit_allocation.fit import count_stored_bytes
from quantkit.formats.codecs.codec import Reason
from quantkit.jobs.output.sizes import WeightSizes
from quantkit.jobs.quantize.prepare import Prepared
from quantkit.tensors.scheme import EMBEDDING_SCHEME
from quantkit.tensors.spec import TensorSpec


def weight_sizes(prepared: Prepared, output_bytes: int) -> WeightSizes:
    """Return the sizes of a planned output with files of weights of `output_bytes`."""
    source = prepared.source
    codes = prepared.target.codes
    assert codes is not None
    source_bytes = sum(file.size for file in source.files() if file.path.suffix != ".json")
    if not source.config.runnable:
        return WeightSizes(source_bytes, output_bytes, 0, None)
    embedding = next(spec for spec in prepared.output.planned if spec.name == f"{EMBEDDING}.weight")
    able = embedding.scheme is None and not isinstance(
        codes.codec(EMBEDDING_SCHEME, embedding=True), Reason
    )
    int8 = TensorSpec(
        embedding.name, embedding.shape, codes.scale_dtype or embedding.dtype, EMBEDDING_SCHEME
    )
    return WeightSizes(
        source_bytes,
        output_bytes,
        count_stored_bytes(embedding, codes),
        count_stored_bytes(int8, codes) if able else None,
    )
