"""OpenAI's API, with OpenAI's own client: answers are those of `quantkit.generate_batch`."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import forked
import httpx
import pytest
from openai import AuthenticationError, OpenAI, RateLimitError
from served import KEY, started

import quantkit

CHAT = [{"role": "user", "content": "Who?"}]
CUT_OFF_CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
PROMPTS = [
    "My fellow citizens",
    "The people",
    "In the end",
    "War",
    "I",
    "We the",
    "Peace and",
    "On this day",
]


@pytest.fixture(scope="module")
def loaded(model: Path) -> tuple[Any, Any]:
    return quantkit.load(model, backend="cpu-exact")


@pytest.fixture(scope="module")
def expected(loaded: tuple[Any, Any]) -> list[quantkit.Completion]:
    decoder, tokenizer = loaded
    return quantkit.generate_batch(decoder, PROMPTS, tokenizer=tokenizer, max_new_tokens=24)


@pytest.mark.slow
def test_texts_at_once_are_those_alone(client: OpenAI, expected: list[quantkit.Completion]) -> None:
    def continued(prompt: str) -> Any:
        return client.completions.create(model="demo", prompt=prompt, max_tokens=24, temperature=0)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(continued, PROMPTS))
    assert [one.choices[0].text for one in answers] == [one.text for one in expected]
    assert {one.choices[0].finish_reason for one in answers} == {"length"}
    assert [one.usage.prompt_tokens for one in answers] == [one.prompt_tokens for one in expected]
    assert {one.usage.completion_tokens for one in answers} == {24}


@pytest.mark.slow
def test_pieces_are_the_whole(client: OpenAI, expected: list[quantkit.Completion]) -> None:
    pieces = list(
        client.completions.create(
            model="demo",
            prompt=PROMPTS[0],
            max_tokens=24,
            temperature=0,
            stream=True,
            logprobs=2,
            stream_options={"include_usage": True},
        )
    )
    *texts, usage = pieces
    assert usage.usage is not None
    assert (usage.choices, usage.usage.completion_tokens) == ([], 24)
    text = "".join(one.choices[0].text for one in texts)
    assert text == expected[0].text
    assert [one.choices[0].finish_reason for one in texts] == [None] * (len(texts) - 1) + ["length"]
    parts = [one.choices[0].logprobs for one in texts]
    tokens = [token for part in parts if part is not None for token in part.tokens or []]
    offsets = [offset for part in parts if part is not None for offset in part.text_offset or []]
    assert "".join(tokens) == text
    assert offsets == [len("".join(tokens[:number])) for number in range(24)]


def test_line_ends_of_a_text_do_not_end_a_line_of_a_stream(address: str) -> None:
    prompt = "one\u2028two\u2029three\x85four"
    body = {"prompt": prompt, "max_tokens": 1, "echo": True, "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line]  # where `str.splitlines` does
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(choice["text"] for event in events for choice in event["choices"]).startswith(
        prompt
    )


def test_flags_of_a_stream_may_be_false(client: OpenAI) -> None:
    options: Any = {
        "include_usage": None,
        "continuous_usage_stats": False,
        "include_obfuscation": False,
    }
    pieces = list(
        client.completions.create(
            model="demo", prompt="x", max_tokens=2, stream=True, stream_options=options
        )
    )
    assert all(piece.usage is None for piece in pieces)


def test_messages_are_answered(client: OpenAI, loaded: tuple[Any, Any]) -> None:
    given: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Who?"}],
        "max_tokens": 12,
        "temperature": 0.8,
        "seed": 5,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 1,
    }
    whole = client.chat.completions.create(**given)
    texts = [one.message.content for one in whole.choices]
    decoder, tokenizer = loaded
    prompt = tokenizer.encode("user: Who?\nassistant:", specials=True, bos=False)
    alone = quantkit.generate_batch(
        decoder, [prompt], tokenizer=tokenizer, max_new_tokens=12, temperature=0.8, seed=5, n=2
    )
    assert texts == [(one.text or "").removeprefix(" ") for one in alone]
    assert texts[0] != texts[1]
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == 12
    streamed = ["", ""]
    for piece in client.chat.completions.create(**given, stream=True):
        for choice in piece.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_the_last_message_is_continued_whole_or_in_pieces(
    client: OpenAI, loaded: tuple[Any, Any]
) -> None:
    begun: list[Any] = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "The people of"},
    ]
    options: dict[str, Any] = {
        "model": "demo",
        "messages": begun,
        "max_tokens": 6,
        "temperature": 0,
    }
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    whole = (
        client.chat.completions.create(**options, extra_body=continued).choices[0].message.content
    )
    decoder, tokenizer = loaded
    prompt = tokenizer.encode("user: Who?\nassistant: The people of", specials=True, bos=False)
    (alone,) = quantkit.generate_batch(decoder, [prompt], tokenizer=tokenizer, max_new_tokens=6)
    assert whole == alone.text
    assert whole.startswith(" ")
    pieces = client.chat.completions.create(**options, extra_body=continued, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole


def test_what_the_template_does_not_print_is_refused(address: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    question = {"role": "user", "content": "Who?"}
    calls = [question, {"role": "assistant", "content": None, "tool_calls": [call]}, question]
    status, answer = _post(address, "/v1/chat/completions", {"messages": calls, "max_tokens": 2})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "messages[1].tool_calls[0].function.name" in answer["error"]["message"]
    counts = []
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "Be brief."}, question]
        _, answer = _post(address, "/v1/chat/completions", {"messages": messages, "max_tokens": 2})
        counts.append((answer["usage"], answer["choices"]))
    assert counts[0] == counts[1]


def test_options_hold(client: OpenAI, expected: list[quantkit.Completion]) -> None:
    text = expected[0].text or ""
    stop = text[8:11]
    found = client.completions.create(
        model="demo", prompt=PROMPTS[0], max_tokens=24, temperature=0, stop=[stop]
    )
    assert (found.choices[0].text, found.choices[0].finish_reason) == (
        text[: text.index(stop)],
        "stop",
    )
    token = expected[0].token_ids[0]
    other = client.completions.create(
        model="demo", prompt=PROMPTS[0], max_tokens=1, temperature=0, logit_bias={str(token): -100}
    )
    assert other.choices[0].text != text[: len(other.choices[0].text)]
    assert len(client.completions.create(model="demo", prompt="War").choices[0].text) > 0
    assert client.completions.create(model="demo", prompt="War").usage.completion_tokens == 16  # type: ignore[union-attr]


def test_the_rest_of_the_api(client: OpenAI, address: str, loaded: tuple[Any, Any]) -> None:
    assert [one.id for one in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    ids = loaded[1].encode("My fellow")
    assert _post(address, "/tokenize", {"prompt": "My fellow"}) == (
        200,
        {"count": len(ids), "max_model_len": 512, "tokens": ids},
    )
    assert _post(address, "/detokenize", {"tokens": ids}) == (
        200,
        {"prompt": loaded[1].decode(ids)},
    )
    assert _health(address) == {"status": "ok"}
    metrics = _metrics(address)
    assert "quantkit_generation_tokens_total " in metrics
    assert "quantkit_running_requests 0.0" in metrics


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (
            "/v1/completions",
            {"model": "gpt", "prompt": "x"},
            404,
            "the model 'gpt' is not served here; 'demo' is",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "max_tokens": 600},
            400,
            "exceed the length of a sequence",
        ),
        ("/v1/completions", {"prompt": "x", "n": 5000}, 400, "n is out of range"),
        (
            "/v1/completions",
            {"prompt": "x", "temprature": 1},
            400,
            "'temprature' in 'body' is not supported",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "stream_options": {}, "temperature": "hot"},
            400,
            "temperature",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "stream_options": {"include_usage": True}},
            400,
            "requires 'stream'",
        ),
        ("/v1/completions", {"prompt": "x", "stream": 1}, 400, "stream"),
        ("/v1/completions", {}, 400, "'prompt' is missing"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "content"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/completions", b"[1]", 400, "is not a JSON object"),
        ("/v1/completions", b'{"prompt": "a", "prompt": "b"}', 400, "occurs twice"),
        ("/v1/completions", b'{"prompt": ' + b"[" * 5000, 400, "is not a JSON object"),
        ("/v1/completions", b"\xff", 400, "not UTF-8"),
        ("/v1/completions", b" " * ((8 << 20) + 1), 413, "the body has more than 8388608 bytes"),
        ("/detokenize", {"tokens": [10**9]}, 400, "outside the vocabulary"),
        ("/detokenize", {"tokens": "x"}, 400, "a list of token ids"),
        ("/nothing", {}, 404, "Not Found"),
    ],
)
def test_errors_say_what_is_wrong(
    path: str, body: Any, status: int, message: str, address: str
) -> None:
    found, answer = _post(address, path, body)
    assert (found, answer["error"]["type"]) == (status, "invalid_request_error")
    assert message in answer["error"]["message"]


def test_too_large_a_body_is_not_read_to_its_end(address: str) -> None:
    with socket.create_connection(urlsplit(address).netloc.split(":"), timeout=60) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
            b" application/json\r\n"
        )
        client.sendall(b"Content-Length: %d\r\n\r\n" % (64 << 20))
        client.sendall(b" " * ((8 << 20) + 1))
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))  # until the server closes it
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nconnection: close\r\n" in answer.lower()


def test_only_json_is_read(address: str) -> None:
    assert (
        _post(address, "/v1/completions", {"prompt": "x"}, {"Content-Type": "text/plain"})[0] == 415
    )
    assert _post(address, "/v1/completions", {"prompt": "x"}, {"Host": "evil.example"})[0] == 421


def test_whoever_goes_away_gives_the_slot_back(client: OpenAI, address: str) -> None:
    """All four slots and the four that wait are taken; then the clients leave, and the next one
    is served.
    """
    long: dict[str, Any] = {
        "model": "demo",
        "prompt": "War",
        "max_tokens": 500,
        "logit_bias": {"2": -100},
    }
    streams = [client.completions.create(**long, stream=True) for _ in range(8)]
    with pytest.raises(RateLimitError) as refused:
        client.completions.create(**long)
    assert refused.value.response.headers["retry-after"] == "1"
    for stream in streams:
        stream.close()
    deadline = time.monotonic() + 20
    while "quantkit_running_requests 0.0" not in _metrics(address):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (
        client.completions.create(model="demo", prompt="War", max_tokens=2).choices[0].finish_reason
        == "length"
    )


@pytest.mark.slow
def test_a_key_is_needed_where_there_is_one(model: Path) -> None:
    with started(model, "--api-key", KEY) as (_, address):
        with pytest.raises(AuthenticationError):
            OpenAI(base_url=f"{address}/v1", api_key="another", max_retries=0).models.list()
        assert OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0).models.list().data
        assert _health(address) == {"status": "ok"}


@pytest.mark.slow
def test_running_requests_end_before_the_server_does(model: Path) -> None:
    with started(model, "--context", "512") as (process, address):
        client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(
            model=model.name, prompt="War", max_tokens=300, stream=True
        )
        first = next(stream)
        process.send_signal(signal.SIGTERM)
        reasons = [one.choices[0].finish_reason for one in (first, *stream)]
        assert reasons[-1] in ("stop", "length")
        assert process.wait(60) == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--host", "0.0.0.0"],
            "could use this server without an API key (found 0.0.0.0); set --api-key",
        ),
        (["--port", "70000"], "--port is out of range"),
        (["--slots", "0"], "--slots must be at least 1"),
        (
            ["--host", "192.0.2.1", "--api-key", KEY],
            "the server cannot use this address (found 192.0.2.1:8000)",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(options: list[str], message: str, model: Path) -> None:
    done = subprocess.run(
        forked.quantkit("serve", model, *options), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "x", "model": "gpt"}, "model"),
        ("/v1/completions", {"prompt": "x", "model": 5}, "model"),
        ("/v1/completions", {"prompt": "x", "temperature": "hot"}, "temperature"),
        ("/v1/completions", {"prompt": "x", "top_p": 2}, "top_p"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": "1"}, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 600}, "prompt"),
        ("/v1/completions", {"prompt": "x", "n": 129}, "n"),
        ("/v1/completions", {"prompt": "x", "stop": [""]}, "stop"),
        ("/v1/completions", {"prompt": "x", "stop": ["x"] * 257}, "stop"),
        ("/v1/completions", {"prompt": "x", "logprobs": 101}, "logprobs"),
        ("/v1/completions", {"prompt": "x", "stream": 1}, "stream"),
        (
            "/v1/completions",
            {"prompt": "x", "stream_options": {"include_usage": True}},
            "stream_options",
        ),
        ("/v1/completions", {"prompt": "x", "response_format": {"type": "xml"}}, "response_format"),
        ("/v1/completions", {"prompt": "x", "temprature": 1}, "temprature"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages"),
        ("/v1/chat/completions", {"messages": "x"}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "logprobs": True, "top_logprobs": 101},
            "top_logprobs",
        ),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "max_completion_tokens": -1},
            "max_completion_tokens",
        ),
        ("/v1/chat/completions", {"messages": CHAT, "tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {"messages": CHAT, "tools": [{}]}, "tools"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "chat_template_kwargs": {"tools": 1}},
            "chat_template_kwargs",
        ),
        ("/v1/chat/completions", {"messages": [CUT_OFF_CALL]}, "messages"),
        (
            "/v1/completions",
            {"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options",
        ),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        (
            "/v1/completions",
            b'{"prompt": "x", "logit_bias": ' + b"[" * 99 + b"]" * 99 + b"}",
            "logit_bias",
        ),
        ("/v1/completions", b'{"prompt": "x", "top_p": 1e999}', "top_p"),
        ("/v1/completions", b'{"prompt": "x", "seed": 1, "seed": 2}', "seed"),
        ("/v1/completions", b"[1]", None),
    ],
)
def test_errors_name_the_field_that_is_wrong(
    path: str, body: Any, field: str | None, address: str
) -> None:
    status, answer = _post(address, path, body)
    assert (400 <= status < 500, answer["error"]["param"]) == (True, field)


def _post(
    address: str, path: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)) as connection:
        connection.request(
            "POST", path, content, {"Content-Type": "application/json", **(headers or {})}
        )
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def _metrics(address: str) -> str:
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        return str(answer.read().decode())


def _health(address: str) -> Any:
    with urllib.request.urlopen(f"{address}/health") as answer:
        return json.loads(answer.read())
