"""The page's files, and what the server states of its model."""

from __future__ import annotations

import http.client
import json
import re
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from command import Capture, run
from openai import BadRequestError, OpenAI
from served import started

import quantkit
from quantkit.serve.about import about
from quantkit.serve.page import routes

FOLDER = Path(routes.__file__).parent


@pytest.mark.slow
def test_the_files_of_the_page_are_served_and_no_others(address: str) -> None:
    for path, (name, kind) in routes.FILES.items():
        status, headers, content = _get(address, path)
        assert (status, content) == (200, (FOLDER / name).read_bytes())
        assert headers["content-type"] == f"{kind}; charset=utf-8"
        assert (
            headers["content-security-policy"]
            == "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
            " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == (
            "nosniff",
            "no-referrer",
        )
    for path in (
        "/index.html",
        "/routes.py",
        "/../routes.py",
        "/%2e%2e/app.py",
        "/page/page.js",
        "//etc/passwd",
    ):
        assert _get(address, path)[0] == 404
    shipped = {path.name for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js")}
    assert shipped == {name for name, _ in routes.FILES.values()}


def test_no_file_names_another_host_or_makes_html_of_text() -> None:
    for name, _ in routes.FILES.values():
        content = (
            (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
        )  # a namespace
        assert not re.search(r"(https?|wss?)://|@import|url\(|[\"']//", content), name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", content
        )
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", page)
    assert set(re.findall(r'(?:src|href)="([^"#]*)"', page)) - {"style.css", "page.js"} == set(
        re.findall(r'href="(data:image/svg\+xml,[^"]*)"', page)
    )


def test_the_page_needs_no_key_and_the_api_does(keyed: tuple[str, str]) -> None:
    address, printed = keyed
    assert printed == f"chat with it in a browser: {address}/\n"
    assert {_get(address, path)[0] for path in routes.FILES} == {200}
    assert {_get(address, path)[0] for path in ("/v1/models", "/metrics", "/routes.py")} == {401}


def test_the_model_says_what_its_folder_states(client: OpenAI, model: Path) -> None:
    found = client.models.retrieve("demo").model_extra
    assert found is not None
    inspected, made = quantkit.inspect(model), json.loads((model / "quantkit.json").read_text())
    assert found["quantkit"] == {
        **about(model),
        "run_bytes": inspected.run_bytes,
        "cache_bytes_per_token": inspected.cache_bytes_per_token,
        "cache_slots": found["quantkit"]["cache_slots"],
        "chat": True,
    }
    assert found["quantkit"]["cache_slots"] >= 1
    stated, texts = found["quantkit"], made["quality"]["texts"]
    assert (stated["scheme"], stated["weight_bytes"]) == ("int4-g32", inspected.weight_bytes)
    assert (stated["context"], stated["readers"]) == (inspected.context, inspected.readers)
    certificate = stated["certificate"]
    assert certificate["passed"] is True
    assert [one["kl"] for one in certificate["texts"]] == [one["kl"] for one in texts]
    assert min(one["kl"] for one in texts) <= certificate["kl"] <= max(one["kl"] for one in texts)


@pytest.mark.slow
def test_a_model_without_a_chat_template_offers_no_chat(model: Path) -> None:
    with started(model, "--context", "128") as (process, address):
        assert process.stdout is not None
        assert f"{address}/\n" not in process.stdout.readline()
        with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            served_model = client.models.list().data[0]
            assert (served_model.model_extra or {})["quantkit"]["chat"] is False
            with pytest.raises(BadRequestError, match="--template"):
                client.chat.completions.create(
                    model=served_model.id, messages=[{"role": "user", "content": "Hi"}]
                )
            assert (
                client.completions.create(model=served_model.id, prompt="The", max_tokens=2)
                .choices[0]
                .text
            )


def test_a_template_that_cannot_be_used_ends_the_server_at_once(
    model: Path, capfd: Capture
) -> None:
    code, _, _ = run(capfd, "serve", model, "--port", "0", "--template", "no-such-template")
    assert code == 2


def test_a_folder_that_states_less_can_be_served(
    model: Path, demo_model: Path, tmp_path: Path
) -> None:
    floats = about(demo_model)
    assert (floats["scheme"], floats["certificate"]) == (None, None)
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    manifest = tmp_path / "quantkit.json"
    manifest.unlink()
    assert (about(tmp_path)["scheme"], about(tmp_path)["certificate"]) == ("int4-g32", None)
    made = json.loads((model / "quantkit.json").read_text())
    made["quality"]["texts"][0]["kl"] = 1e9
    manifest.write_text(json.dumps(made))
    certificate = about(tmp_path)["certificate"]
    assert certificate["passed"] is False
    assert "too far from its source" in certificate["problem"]
    made["positions"] = "another form"
    manifest.write_text(json.dumps(made))
    assert about(tmp_path) == {"problem": "does not state the divergence by position"}


def _get(address: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """The status, headers and content of a path, which is sent as it is."""
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, headers, response.read()
