"""The model card of a converted folder: what the source states of its licence and authors, in a
file that hubs read.
"""

from __future__ import annotations

from quantkit.formats.container import Output
from quantkit.jobs.output.labels import file_name
from quantkit.version import __version__


def write_conversion_card(output: Output) -> bytes:
    """Write a short card with the source's metadata.

    Its text describes the source, so it is not copied.
    """
    # A slow import, which only conversions with a card need.
    from huggingface_hub import ModelCardData

    metadata = ModelCardData(**output.authorship).to_yaml(original_order=list(output.authorship))
    source = file_name(output.source.path)
    if source is None:
        origin = ""
    else:
        origin = f" from `{source}`"
    text = f"Converted{origin} by quantkit {__version__}."
    return f"---\n{metadata}\n---\n\n# {output.name}\n\n{text}\n".encode()
