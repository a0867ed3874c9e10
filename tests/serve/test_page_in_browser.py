"""The page in headless Chromium."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import chromium
import pytest
from openai import OpenAI
from served import KEY

from quantkit.quality.figures import Estimate
from quantkit.quality.positions import PositionDivergence
from quantkit.serve.about import about

CHROMIUM = chromium.executable()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: neither on PATH nor named by CHROMIUM"
)
SIZES = pytest.mark.parametrize("width", [375, 1180])

_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_READY = "document.querySelector('#tiles > div')"
_ENDED = "document.querySelector('.meta button') && !document.querySelector('[aria-busy]')"
_FOCUSED = "document.activeElement.id"
_ANSWER = "[...document.querySelectorAll('.answer')].at(-1).textContent"
_STATUS = "document.getElementById('status').textContent"
_NOTE = "document.querySelector('.view > .note').textContent"
_LOW = (
    "(one) => (({ width, height }) => width && Math.min(width, height) <"
    " 24)(one.getBoundingClientRect())"
)
_SHOWN = (
    "document.getElementById('stop').checkVisibility() && document.getElementById('send').hidden"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    assert CHROMIUM is not None
    with chromium.opened(CHROMIUM, tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@SIZES
def test_a_chat_is_streamed(
    width: int, client: OpenAI, address: str, browser: chromium.Page
) -> None:
    _open(browser, address, width)
    tiles = browser.value("document.getElementById('tiles').innerText")
    assert all(word in tiles for word in ("int4-g32", "bits per weight", "KL", "passed", "512"))
    browser.click("#settings-open")
    browser.click("#max_tokens")
    browser.write("24")
    browser.press("Enter")
    assert browser.value("document.getElementById('settings-open').textContent") == "Settings (1)"
    messages: list[Any] = []
    for question in ("Who are you?", "And now?"):
        browser.click("#message")
        browser.write(question)
        browser.press("Enter")
        messages.append({"role": "user", "content": question})
        browser.wait(
            f"{_ENDED} && document.querySelectorAll('.turn').length === {len(messages) // 2 + 1}"
        )
        expected = client.chat.completions.create(model="demo", messages=messages, max_tokens=24)
        messages.append({"role": "assistant", "content": expected.choices[0].message.content})
        assert _letters(browser.value(_ANSWER)) == _letters(messages[-1]["content"])
    meta = browser.value("[...document.querySelectorAll('.meta')].at(-1).textContent")
    assert re.search(r"24 tokens · [\d.]+ tokens/s · first token [\d.]+ s$", meta)
    assert browser.value(_NOTE) == "Stopped at the limit of 24 tokens."
    assert re.match(
        r"int4-g32 · .* · KL [\d.]+ · 512 tokens",
        browser.value("document.getElementById('facts').innerText"),
    )
    assert browser.value(_OVERFLOW) == 0

    browser.value(f"window.before = {_ANSWER}; document.querySelector('.answer').id = 'old'")
    browser.click(".again")
    browser.wait(_ENDED)
    assert browser.value(f"[document.querySelectorAll('.turn').length, {_ANSWER} === before]") == [
        2,
        True,
    ]
    assert browser.value("document.querySelectorAll('.again').length") == 1

    browser.click("#new")
    assert browser.value("document.querySelectorAll('.turn').length") == 0
    assert browser.value("document.getElementById('welcome').checkVisibility()")
    assert browser.errors == []
    assert {
        f"{one.scheme}://{one.netloc}"
        for one in map(urlsplit, browser.requests)
        if one.scheme != "data"
    } == {address}


def test_the_certificate_is_that_of_the_folder(
    model: Path, address: str, browser: chromium.Page
) -> None:
    _open(browser, address)
    browser.click("#certificate-open")
    texts = json.loads((model / "quantkit.json").read_text())["quality"]["texts"]
    shown = browser.value("document.getElementById('certificate').innerText")
    assert "passed the comparison" in shown
    for one in texts:
        assert one["text"] in shown
        assert str(Estimate(one["kl"], one["kl_error"])) in shown
    browser.press("Escape")

    browser.value("import('/certificate.js').then((found) => (window.module = found)); 0")
    browser.wait("window.module")
    for value, error in ((0.0832, 0.0144), (0.0123, 0.0041), (12.34, 0.31), (12.3, None)):
        given = json.dumps([value, error])
        assert browser.value(f"module.figure(...{given})") == str(Estimate(value, error))

    def body(**changed: Any) -> str:
        stated = json.dumps({"max_model_len": 512, "quantkit": {**about(model), **changed}})
        return str(
            browser.value(
                f"module.certificateBody({stated}).map((one) => one.textContent).join(' ')"
            )
        )

    assert "no certificate" in body(certificate=None)
    assert "The weights are floats" in body(certificate=None, scheme=None)
    accepted = {**about(model)["certificate"], "passed": False, "problem": "too far"}
    assert "Beyond its bound, and accepted: too far." in body(certificate=accepted)
    buckets = [
        asdict(
            PositionDivergence(
                start=0, stop=128, tokens=128, kl=0.0832, kl_error=0.0144, top1_agreement=0.9
            )
        )
    ]
    positions = {
        "text": "long.txt",
        "length": 128,
        "windows": 2,
        "kl_bound": 0.25,
        "caches": {"float": buckets},
    }
    assert "0-1270.083 ± 0.014" in body(certificate={**accepted, "positions": positions})


def test_stop_frees_the_slot(address: str, browser: chromium.Page) -> None:
    _open(browser, address)
    ended = _requests(address)
    browser.value(
        "original = fetch; fetch = async (...given) => { const found = await original(...given);"
        " document.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape' })); return found;"
        " }; 0"
    )
    browser.write("Who are you?")
    browser.press("Enter")
    browser.wait(_ENDED)
    assert browser.value(_NOTE) == "Stopped."
    deadline = time.monotonic() + 20
    while "quantkit_running_requests 0.0" not in _metrics(address):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert _requests(address) == ended  # cancelled, not completed


@SIZES
def test_an_answer_is_shown_while_it_comes_and_announced_when_it_ends(
    width: int, address: str, browser: chromium.Page
) -> None:
    _open(browser, address, width)
    rest = (
        "2 + 2)  # "
        + "x" * 200
        + "\n```\n\n1. one\n2. two\n\n<img src=x onerror=alert(1)> http://x/"
        + "y" * 200
    )
    first = {"content": "It is **four**.\n\n```py\nprint("}
    _script(browser, {"reasoning_content": "Two and two"}, first, "pause", {"content": rest})
    browser.write("2 + 2?")
    browser.press("Enter")
    browser.wait(f"{_ANSWER}.includes('print(')")
    assert browser.value("document.querySelector('.answer').ariaBusy") == "true"
    assert (
        browser.value(
            "document.querySelectorAll('#log [aria-live], #log [role=status], #log"
            " [role=alert]').length"
        )
        == 0
    )
    assert browser.value(_STATUS) == "The model answers."
    assert browser.value(_SHOWN)
    browser.value("resume()")
    browser.wait(_ENDED)
    assert browser.value("document.querySelector('.answer strong').textContent") == "four"
    assert browser.value("document.querySelector('.answer pre').textContent").startswith(
        "print(2 + 2)"
    )
    assert browser.value("document.querySelectorAll('.answer ol > li').length") == 2
    assert browser.value("document.querySelectorAll('.answer img, .answer a').length") == 0
    assert "<img src=x" in browser.value(_ANSWER)
    assert browser.value("document.querySelector('.reasoning').open") is False
    assert browser.value("document.querySelector('.thoughts').textContent") == "Two and two"
    assert browser.value(_STATUS).startswith("It is **four**.")
    assert "Two and two" not in browser.value(_STATUS)
    assert browser.value(_OVERFLOW) == 0
    assert browser.errors == []


def test_a_part_of_an_answer_stays_when_it_is_stopped(address: str, browser: chromium.Page) -> None:
    _open(browser, address)
    _script(browser, {"content": "The first half"}, "pause", {"content": " and the second"})
    browser.write("Go on")
    browser.press("Enter")
    browser.wait(f"{_ANSWER} === 'The first half'")
    browser.click("#stop")
    browser.wait(_ENDED)
    assert browser.value(_ANSWER) == "The first half"
    assert browser.value(_NOTE) == "Stopped."
    browser.click("#message")
    browser.write("And then?")
    browser.press("Enter")
    assert browser.value("sent.messages.map((one) => one.content)") == [
        "Go on",
        "The first half",
        "And then?",
    ]


def test_a_context_that_is_full_is_no_other_limit(address: str, browser: chromium.Page) -> None:
    _open(browser, address)
    _script(browser, {"content": "So"}, reason="length", tokens=512)
    browser.write("Go on")
    browser.press("Enter")
    browser.wait(_ENDED)
    assert browser.value(_NOTE) == "Stopped: the context of 512 tokens is full. Start a new chat."


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (
            "new Response('{}', {status: 429, headers: {'Retry-After': '7'}})",
            "The server is busy. Try again in 7 seconds.",
        ),
        (
            "Response.json({error: {message: 'top_p must lie in [0, 1]'}}, {status: 400})",
            "top_p must lie in [0, 1]",
        ),
        ("new Response('gone', {status: 502})", "The server answered with status 502."),
        ('new Response(\'data: {"error": {"message": "NaN in logits"}}\\n\\n\')', "NaN in logits"),
        ("new Response('')", "The connection ended before the answer did."),
        (
            "Promise.reject(new TypeError('Failed to fetch'))",
            "The server does not answer. Is it still running?",
        ),
    ],
)
def test_errors_are_shown_as_they_are(
    response: str, message: str, address: str, browser: chromium.Page
) -> None:
    _open(browser, address)
    browser.value(
        f"fetch = async (path, options) => (window.sent = JSON.parse(options.body), {response}); 0"
    )
    browser.write("Who?")
    browser.press("Enter")
    browser.wait(_ENDED)
    assert browser.value("document.querySelector('.view > .problem').textContent") == message
    assert browser.value(_STATUS) == message
    assert browser.value("document.querySelector('.again').textContent") == "Try again"
    browser.write("Again?")
    browser.press("Enter")
    browser.wait(f"{_ENDED} && document.querySelectorAll('.turn').length === 2")
    assert browser.value("sent.messages.map((one) => one.content)") == [
        "Again?"
    ]  # what has no answer is not sent
    assert browser.value("Object.keys(sent).sort()") == [
        "messages",
        "model",
        "stream",
        "stream_options",
    ]


def test_settings_are_sent_and_kept(address: str, browser: chromium.Page) -> None:
    _open(browser, address)
    given = {
        "system": "Be brief.",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_tokens": 12,
        "seed": 7,
    }
    browser.click("#settings-open")
    for name, value in given.items():
        browser.click(f"#{name}")
        browser.write(str(value))
    browser.press("Enter")
    browser.open(f"{address}/", width=375)
    browser.wait(_READY)
    _script(browser, {"content": "Yes"})
    browser.write("Who?")
    browser.press("Enter")
    browser.wait(_ENDED)
    sent = browser.value("sent")
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
    ]
    assert {name: sent[name] for name in given if name != "system"} == {
        k: v for k, v in given.items() if k != "system"
    }
    browser.click("#settings-open")
    browser.click("#top_p")
    browser.write("9")  # 0.99 is allowed, 0.9 and another nine
    browser.click("#top_k")
    browser.write("-")  # no number
    browser.press("Enter")
    assert browser.value("document.getElementById('settings').open")
    assert browser.value("document.getElementById('settings-problem').innerText").startswith(
        "Top k: "
    )
    assert browser.value(_FOCUSED) == "top_k"
    browser.click("#settings [type=reset]")
    browser.wait("document.getElementById('settings-open').textContent === 'Settings'")
    assert browser.value("localStorage.getItem('quantkit.settings')") == "{}"


def test_the_keyboard_is_enough(address: str, browser: chromium.Page) -> None:
    _open(browser, address)
    assert browser.value(_FOCUSED) == "message"
    browser.write("One")
    browser.press("Enter", shift=True)
    browser.write("two")
    assert browser.value("document.getElementById('message').value") == "One\ntwo"
    assert browser.value("document.querySelectorAll('.turn').length") == 0
    browser.press("Tab", shift=True)
    assert browser.value(_FOCUSED) == "certificate-open"
    assert browser.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.press("Enter")
    assert browser.value("document.getElementById('certificate').open")
    browser.press("Escape")
    assert browser.value(f"[{_FOCUSED}, document.getElementById('certificate').open]") == [
        "certificate-open",
        False,
    ]
    browser.press("Tab", shift=True)
    assert browser.value(_FOCUSED) == "settings-open"
    for _ in range(3):
        browser.press("Tab")
    assert browser.value(_FOCUSED) == "send"
    _script(browser, {"content": "The first half"}, "pause")
    browser.press("Enter")
    browser.wait(f"{_ANSWER} === 'The first half'")
    assert browser.value(_FOCUSED) == "stop"
    browser.press("Escape")
    browser.wait(_ENDED)
    assert browser.value(_FOCUSED) == "send"
    assert browser.value("sent.messages[0].content") == "One\ntwo"


@SIZES
def test_every_control_has_a_name_and_is_large_enough(
    width: int, address: str, browser: chromium.Page
) -> None:
    _open(browser, address, width)
    _script(browser, {"reasoning_content": "So"}, {"content": "```\ncode\n```"})
    browser.write("Who?")
    browser.press("Enter")
    browser.wait(_ENDED)
    found = "[...document.querySelectorAll('button, input, textarea, summary')]"
    name = "(one.ariaLabel || one.labels?.[0]?.textContent || one.textContent).trim()"
    assert browser.value(f"{found}.filter((one) => !{name}).map((one) => one.outerHTML)") == []
    assert browser.value(f"{found}.filter({_LOW}).map((one) => one.outerHTML)") == []
    for dialog in ("settings", "certificate", "key"):
        browser.value(f"document.getElementById('{dialog}').showModal()")
        assert browser.value(f"{found}.filter({_LOW}).map((one) => one.outerHTML)") == []
        left, right = browser.value(
            f"(r => [r.left, r.right])(document.getElementById('{dialog}').getBoundingClientRect())"
        )
        assert 0 <= left < right <= width
        browser.value(f"document.getElementById('{dialog}').close()")
    parts = (
        "['header', 'main', 'h1', '[role=status]'].map((one) =>"
        " document.querySelectorAll(one).length)"
    )
    assert browser.value(parts) == [1, 1, 1, 1]


def test_a_key_is_requested_only_where_the_server_needs_one(
    keyed: tuple[str, str], address: str, browser: chromium.Page
) -> None:
    _open(browser, address)
    assert browser.value("document.getElementById('key').open") is False
    browser.open(f"{keyed[0]}/", width=375, phone=True)
    browser.value(
        "localStorage.setItem('quantkit.settings', '{\"max_tokens\": 4}'); sessionStorage.clear()"
    )
    browser.open(f"{keyed[0]}/", width=375, phone=True)
    browser.wait("document.getElementById('key').open")
    assert browser.value(_FOCUSED) == "key-value"
    for key, problem in (("another", True), (KEY, False)):
        browser.write(key)
        browser.press("Enter")
        wait = "document.getElementById('key-problem').checkVisibility()" if problem else _READY
        browser.wait(wait)
    assert browser.value("document.getElementById('key').open") is False
    assert browser.value("JSON.stringify(localStorage)").count(KEY) == 0
    browser.click("#message")
    browser.write("Who?")
    browser.press("Enter")
    browser.wait(_ENDED)
    assert "4 tokens" in browser.value("document.querySelector('.meta').textContent")


def _open(browser: chromium.Page, address: str, width: int = 1180) -> None:
    """The page as a newcomer finds it."""
    browser.open(f"{address}/", width=width, phone=width < 400)
    browser.value("localStorage.clear()")
    browser.errors.clear()
    browser.requests.clear()
    browser.open(f"{address}/", width=width, phone=width < 400)
    browser.wait(_READY)


def _script(browser: chromium.Page, *deltas: Any, reason: str = "stop", tokens: int = 9) -> None:
    """Let the page have these pieces for an answer; ``pause`` waits for ``resume()``."""
    usage = {"choices": [], "usage": {"completion_tokens": len(deltas), "total_tokens": tokens}}
    events = [one if one == "pause" else {"choices": [{"delta": one}]} for one in deltas]
    events += [{"choices": [{"delta": {}, "finish_reason": reason}]}, usage]
    lines = [one if one == "pause" else f"data: {json.dumps(one)}\n\n" for one in events]
    browser.value(
        """((lines) => {
          fetch = async (path, { body, signal }) => {
            sent = JSON.parse(body);
            const stream = new ReadableStream({
              async start(controller) {
                signal.addEventListener("abort", () => controller.error(new DOMException("", "AbortError")));
                for (const line of [...lines, "data: [DONE]\\n\\n"]) {
                  if (line === "pause") await new Promise((resolve) => (resume = resolve));
                  else controller.enqueue(new TextEncoder().encode(line));
                }
                controller.close();
              },
            });
            return new Response(stream);
          };
        })"""  # noqa: E501
        f"({json.dumps(lines)}); 0"
    )


def _letters(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _requests(address: str) -> list[str]:
    return re.findall(r"quantkit_requests_total\{.*", _metrics(address))


def _metrics(address: str) -> str:
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        return str(answer.read().decode())
