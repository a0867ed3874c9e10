"""A server of the demo model, and OpenAI's client for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from served import KEY, TEMPLATE, started

import quantkit
from quantkit.text.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "plain.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="session")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An int4 model, whose tokenizer a template can spell."""
    folder = tmp_path_factory.mktemp("served")
    quantkit.convert(demo_model, folder / "floats", source_check=False)
    quantkit.quantize(
        folder / "floats", folder / "int4", "int4-g32", method="rtn", source_check=False
    )
    return folder / "int4"


@pytest.fixture(scope="session")
def address(model: Path, template: Path) -> Iterator[str]:
    options = [
        "--template",
        template,
        "--slots",
        "4",
        "--waiting",
        "4",
        "--name",
        "demo",
        "--context",
        "512",
    ]
    with started(model, *options) as (_, found):
        yield found


@pytest.fixture(scope="session")
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="session")
def loaded_tokens(model: Path) -> dict[str, int]:
    """The token of each text that is one token's, by the bytes of the tokens."""
    tokenizer = load_tokenizer(model)
    assert tokenizer.token_bytes is not None
    found = {token: tokenizer.token_bytes.of(token) for token in range(tokenizer.vocab_size)}
    return {data.decode(errors="replace"): token for token, data in found.items() if data}


@pytest.fixture(scope="session")
def keyed(model: Path, template: Path) -> Iterator[tuple[str, str]]:
    """The address of a server that needs a key, and what the command prints after it."""
    with started(model, "--template", template, "--api-key", KEY, "--context", "128") as (
        process,
        found,
    ):
        assert process.stdout is not None
        yield found, process.stdout.readline()
