"""The examples of clients: OpenAI's runs, and the others can be read."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from paths import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.slow
def test_the_client_of_openai_runs(address: str) -> None:
    command = [sys.executable, str(EXAMPLES / "openai_client.py"), f"{address}/v1"]
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, whole, stream, likely, river, continued = re.split(
        r"^--- .*\n", done.stdout, flags=re.MULTILINE
    )
    answer, counted = whole.rstrip("\n").rsplit("\n", 1)
    assert re.fullmatch(r"\(\d+ tokens, ended by (stop|length)\)", counted)
    assert len(answer) > 5
    assert stream.removesuffix("\n") == answer
    lines = likely.splitlines()
    assert 1 <= len(lines) <= 5
    for line in lines:
        token, probability, others = re.fullmatch(
            r"('.*?'|\".*?\") ([01]\.\d{3}) \((.*)\)", line
        ).groups()  # type: ignore[union-attr]
        assert others.startswith(f"{token} {probability}, ")  # the likeliest one was taken
    assert json.loads(river).keys() == {"river", "long"}
    assert continued.strip()


def test_the_settings_of_llm_name_what_it_reads() -> None:
    text = (EXAMPLES / "extra-openai-models.yaml").read_text()
    (model,) = yaml.safe_load(text)
    assert model == {
        "model_id": "int4",
        "model_name": "int4",
        "api_base": "http://127.0.0.1:8000/v1",
    }
    (with_key,) = yaml.safe_load(text.replace("#  api_key_name", "  api_key_name"))
    assert with_key == {**model, "api_key_name": "quantkit"}


def test_the_other_clients_can_be_read() -> None:
    ast.parse((EXAMPLES / "langchain_client.py").read_text())
    subprocess.run(["sh", "-n", str(EXAMPLES / "open_webui.sh")], check=True)
    for name in (
        "openai_client.py",
        "langchain_client.py",
        "extra-openai-models.yaml",
        "open_webui.sh",
    ):
        assert "http://127.0.0.1:8000/v1" in (EXAMPLES / name).read_text()
        assert name in (EXAMPLES / "README.md").read_text()
