"""OpenAI's batch format: requests become lines of prompts, and answers have the form of its
responses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from command import Capture, run

import quantkit
from quantkit.errors import RequestError

TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"
TOOL = {"type": "function", "function": {"name": "look"}}
CHAT = [{"role": "user", "content": "My fellow citizens"}]


def request(custom_id: str, *, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    given = {"model": "gpt-4o", **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": given}


REQUESTS = [
    request(
        "a", messages=CHAT, max_tokens=5, logprobs=True, top_logprobs=2, stream=False, user="me"
    ),
    request(
        "b",
        messages=CHAT,
        max_completion_tokens=4,
        n=2,
        temperature=1.2,
        top_p=0.9,
        seed=7,
        stop=None,
    ),
    request(
        "c", url="/v1/completions", prompt="We hold these", max_tokens=6, logprobs=1, echo=True
    ),
    request(
        "d", url="/v1/completions", prompt=[1, 20, 30], max_tokens=3, stop=["e"], presence_penalty=0
    ),
]
SAME: list[dict[str, Any]] = [
    {"messages": CHAT, "max_new_tokens": 5, "logprobs": 2},
    {"messages": CHAT, "max_new_tokens": 4, "n": 2, "temperature": 1.2, "top_p": 0.9, "seed": 7},
    {"prompt": "We hold these", "max_new_tokens": 6, "logprobs": 1, "echo": True},
    {"token_ids": [1, 20, 30], "max_new_tokens": 3, "stop": ["e"]},
]


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "demo"
    quantkit.convert(demo_model, folder, source_check=False)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def written(path: Path, *lines: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def answers(
    model: Path, folder: Path, name: str, *lines: Mapping[str, Any], **options: Any
) -> list[dict[str, Any]]:
    prompts = written(folder / f"{name}.jsonl", *lines)
    quantkit.generate_file(model, prompts, folder / f"{name}.out", device="cpu", **options)
    return [json.loads(line) for line in (folder / f"{name}.out").read_text().splitlines()]


def test_answers_have_openais_form_and_what_lines_of_prompts_get(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = answers(model, tmp_path, "openai", *REQUESTS)
    assert "the requests name gpt-4o; demo answers them" in caplog.text
    same = answers(model, tmp_path, "same", *SAME)
    assert [one["custom_id"] for one in found] == ["a", "b", "c", "d"]
    for number, one in enumerate(found):
        own = [line for line in same if line["index"] == number]
        body, chat = one["response"]["body"], number < 2
        assert one == {
            "id": f"batch_req_{number}",
            "custom_id": REQUESTS[number]["custom_id"],
            "error": None,
            "response": {"status_code": 200, "request_id": f"req_{number}", "body": body},
        }
        assert (body["object"], body["created"], body["model"]) == (
            "chat.completion" if chat else "text_completion",
            0,
            "demo",
        )
        read = [
            choice["message"]["content"] if chat else choice["text"] for choice in body["choices"]
        ]
        assert read == [line["text"] for line in own]
        assert [choice["index"] for choice in body["choices"]] == [line["sample"] for line in own]
        assert [choice["finish_reason"] for choice in body["choices"]] == [
            line["finish_reason"] for line in own
        ]
        new = sum(line["completion_tokens"] for line in own)
        read_tokens = own[0]["prompt_tokens"]
        assert body["usage"] == {
            "prompt_tokens": read_tokens,
            "completion_tokens": new,
            "total_tokens": read_tokens + new,
        }


def test_log_probabilities_have_openais_form(model: Path, tmp_path: Path) -> None:
    chat, text = (
        one["response"]["body"]["choices"][0]
        for one in answers(model, tmp_path, "a", *REQUESTS[::2])
    )
    same_chat, same_text = answers(model, tmp_path, "same", *SAME[::2])
    content = chat["logprobs"]["content"]
    assert [one["token"] for one in content] == [one["token"] for one in same_chat["logprobs"]]
    assert [one["logprob"] for one in content] == [one["logprob"] for one in same_chat["logprobs"]]
    assert all(
        bytes(one["bytes"]).decode() == one["token"] and len(one["top_logprobs"]) == 2
        for one in content
    )
    assert content[0]["top_logprobs"][0].keys() == {"token", "logprob", "bytes"}
    logprobs = text["logprobs"]
    assert logprobs["tokens"] == [one["token"] for one in same_text["logprobs"]]
    assert logprobs["token_logprobs"] == [one["logprob"] for one in same_text["logprobs"]]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for top, line in zip(logprobs["top_logprobs"][1:], same_text["logprobs"][1:], strict=True):
        likeliest = {one["token"]: one["logprob"] for one in line["top_logprobs"]}
        assert top == likeliest | {line["token"]: line["logprob"]}
    places = zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    assert next(places) == ("<s>", 0)
    for number, (token, place) in enumerate(places):
        assert text["text"].startswith(token if number else token.lstrip(), place)


@pytest.mark.parametrize("stop", [None, "e"])
def test_offsets_of_a_continuation_begin_after_the_prompt(
    stop: str | None, model: Path, tmp_path: Path
) -> None:
    line = request(
        "a", url="/v1/completions", prompt="The people", max_tokens=8, logprobs=0, stop=stop
    )
    (found,) = answers(model, tmp_path, "a", line)
    (choice,) = found["response"]["body"]["choices"]
    for token, place in zip(
        choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True
    ):
        assert token.startswith(choice["text"][place : place + len(token)])
    assert choice["logprobs"]["text_offset"][:2] == [
        0,
        min(len(choice["logprobs"]["tokens"][0]), len(choice["text"])),
    ]


CHANGE_NOTHING: dict[str, Any] = {
    "echo": False,
    "functions": [],
    "function_call": "none",
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop_token_ids": [],
    "bad_words": [],
    "include_stop_str_in_output": False,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "best_of": 1,
    "tools": [],
    "stream": False,
    "top_k": -1,
    "n": 1,
    "logit_bias": {},
    "stop": [],
    "suffix": None,
    "prompt_cache_key": "a",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "cache_prompt": True,
    "mm_processor_kwargs": {},
    "return_prompt_text": False,
    "verbosity": "low",
    "service_tier": "auto",
    "prediction": {"type": "content", "content": "x"},
    "priority": 3,
    "user": "me",
    "metadata": {"a": "b"},
}
OF_CHATS: dict[str, Any] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "reasoning_effort": "low",
    "logprobs": False,
    "top_logprobs": 0,
    "parallel_tool_calls": True,
    "tool_choice": "none",
    "include_reasoning": True,
    "add_special_tokens": False,
    "documents": [],
    "modalities": ["text"],
    "response_format": {"type": "text"},
}
OF_TEXTS: dict[str, Any] = {"add_special_tokens": True, "suffix": ""}


@pytest.mark.parametrize("chat", [True, False])
def test_a_request_may_spell_out_what_changes_nothing(
    chat: bool, model: Path, tmp_path: Path
) -> None:
    if chat:
        plain = request("a", messages=CHAT, max_tokens=4)
    else:
        plain = request("a", url="/v1/completions", prompt="The", max_tokens=4)
    options = {**CHANGE_NOTHING, **(OF_CHATS if chat else OF_TEXTS)}
    lines = [plain]
    for number, (key, value) in enumerate(options.items()):
        lines.append({**plain, "custom_id": f"{number}", "body": {**plain["body"], key: value}})
    lines.append({**plain, "custom_id": "all", "body": {**plain["body"], **options}})
    first, *others = [
        answer["response"]["body"] for answer in answers(model, tmp_path, "all", *lines)
    ]
    assert len(others) == len(options) + 1
    for other in others:
        assert {**other, "id": first["id"]} == first


def test_as_many_samples_as_are_returned_may_be_drawn(model: Path, tmp_path: Path) -> None:
    plain = request(
        "a", url="/v1/completions", prompt="The", max_tokens=4, n=2, temperature=1, seed=3
    )
    best = {**plain, "custom_id": "b", "body": {**plain["body"], "best_of": 2}}
    first, second = [
        answer["response"]["body"]["choices"]
        for answer in answers(model, tmp_path, "best", plain, best)
    ]
    assert (len(first), second) == (2, first)
    prompts = written(tmp_path / "a.jsonl", {**best, "body": {**best["body"], "best_of": 3}})
    with pytest.raises(RequestError, match="'best_of'"):
        quantkit.generate_file(model, prompts, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("echo", True),
        ("functions", [{"name": "look"}]),
        ("function_call", {"name": "look"}),
        ("ignore_eos", True),
        ("ignore_eos", 0),
        ("min_tokens", 2),
        ("min_tokens", False),
        ("skip_special_tokens", False),
        ("stop_token_ids", [3]),
        ("use_beam_search", True),
        ("best_of", 2),
        ("best_of", True),
        ("include_reasoning", False),
        ("add_special_tokens", True),
        ("suffix", "x"),
        ("prompt_logprobs", 0),
        ("add_generation_prompt", 1),
        ("continue_final_message", "content"),
        ("reasoning_effort", 3),
        ("chat_template", "{{ messages }}"),
    ],
)
def test_values_that_would_change_the_answer_are_errors_that_name_the_field(
    key: str, value: Any, model: Path, tmp_path: Path
) -> None:
    prompts = written(tmp_path / "a.jsonl", request("a", messages=CHAT, **{key: value}))
    with pytest.raises(RequestError, match=f"'{key}'"):
        quantkit.generate_file(model, prompts, tmp_path / "out")


BEGUN = [*CHAT, {"role": "assistant", "content": "The people of"}]


def test_an_answer_is_continued_with_its_first_space(model: Path, tmp_path: Path) -> None:
    lines = [
        request("a", messages=BEGUN, max_tokens=4, continue_final_message=True),
        request(
            "b",
            messages=BEGUN,
            max_tokens=4,
            continue_final_message=True,
            add_generation_prompt=False,
        ),
        request(
            "c", messages=BEGUN, max_tokens=4, chat_template_kwargs={"continue_final_message": True}
        ),
        {"prompt": "user: My fellow citizens\nassistant: The people of", "max_new_tokens": 4},
        {"prompt": "user: My fellow citizens\nassistant: The people of\n", "max_new_tokens": 4},
        request(
            "d", messages=BEGUN, max_tokens=4, chat_template_kwargs={"add_generation_prompt": False}
        ),
        request("e", messages=BEGUN, max_tokens=4, add_generation_prompt=False),
    ]
    template = tmp_path / "plain.jinja"
    template.write_text(
        TEMPLATE.replace("assistant:", "{% if add_generation_prompt %}assistant:{% endif %}")
    )
    # The tokenizer puts a BOS before prompts, and this template has none.
    bos = "{{ bos_token }}"
    template.write_text(bos + template.read_text())
    found = answers(model, tmp_path, "in", *lines, template=str(template))
    texts = [one["response"]["body"]["choices"][0]["message"]["content"] for one in found[:3]]
    assert texts == [found[3]["text"]] * 3
    assert texts[0].startswith(" ")
    (first, second) = (
        one["response"]["body"]["choices"][0]["message"]["content"] for one in found[5:]
    )
    assert first == second == found[4]["text"].removeprefix(" ")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (
            {
                "continue_final_message": False,
                "chat_template_kwargs": {"continue_final_message": True},
            },
            "continue_final_message",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "reasoning_effort",
        ),
        ({"reasoning_effort": "low", "chat_template_kwargs": 5}, "chat_template_kwargs"),
    ],
)
def test_contradictions_are_errors(
    options: dict[str, Any], field: str, model: Path, tmp_path: Path
) -> None:
    prompts = written(tmp_path / "a.jsonl", request("a", messages=BEGUN, **options))
    with pytest.raises(RequestError, match=f"'{field}'"):
        quantkit.generate_file(model, prompts, tmp_path / "out")


def test_the_effort_reaches_a_template_that_knows_it(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "effort.jinja"
    template.write_text("{{ reasoning_effort | default('medium') }} " + TEMPLATE)
    lines = [
        request(
            "a", messages=CHAT, max_tokens=1, reasoning_effort="the people of these United States"
        ),
        request("b", messages=CHAT, max_tokens=1),
        request("c", messages=CHAT, max_tokens=1, reasoning_effort="medium"),
    ]
    counts = [
        answer["response"]["body"]["usage"]["prompt_tokens"]
        for answer in answers(model, tmp_path, "in", *lines, template=str(template))
    ]
    assert counts[0] > counts[1] == counts[2]
    lines = [request("a", messages=CHAT, max_tokens=1, reasoning_effort="low")]
    assert answers(model, tmp_path, "plain", *lines, template="llama2")


def test_a_message_that_the_template_drops_is_an_error_of_its_line(
    model: Path, tmp_path: Path, capfd: Capture
) -> None:
    template = tmp_path / "roles.jinja"
    template.write_text(
        TEMPLATE.replace("{{ one.role }}", "{% if one.role == 'user' %}user").replace(
            "\n", "{% endif %}"
        )
    )
    critic = [{"role": "critic", "content": "Be brief."}, *CHAT]
    for line in (request("a", messages=critic), {"messages": critic}):
        prompts = written(tmp_path / "a.jsonl", {"messages": CHAT}, line)
        code, _, err = run(
            capfd, "generate", model, "--prompts", prompts, "--output", "-", "--template", template
        )
        assert code == 2
        assert f"{prompts}:2: " in err
        assert "messages[0].content" in err


def test_answers_have_the_requested_format(model: Path, tmp_path: Path) -> None:
    schema = {"type": "string", "pattern": "^[ab]{2}$"}
    form = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}}
    lines = [
        request("a", messages=CHAT, max_tokens=60, response_format=form),
        {"prompt": "The", "max_new_tokens": 60, "response_format": form},
        {"prompt": "The", "max_new_tokens": 3, "response_format": {"type": "text"}},
    ]
    first, second, third = answers(model, tmp_path, "in", *lines)
    for text in (first["response"]["body"]["choices"][0]["message"]["content"], second["text"]):
        assert json.loads(text) in ("aa", "ab", "ba", "bb")
    assert (
        third["text"]
        == answers(model, tmp_path, "plain", {"prompt": "The", "max_new_tokens": 3})[0]["text"]
    )


def test_an_interrupted_run_of_requests_goes_on(model: Path, tmp_path: Path) -> None:
    whole = answers(model, tmp_path, "whole", *REQUESTS)
    prompts = written(tmp_path / "prompts.jsonl", *REQUESTS)

    def progress(phase: str, done: int, *_: object) -> None:
        if (phase, done) == ("generate", 2):
            raise KeyboardInterrupt

    given: dict[str, Any] = {"device": "cpu", "batch_size": 1}
    with pytest.raises(KeyboardInterrupt):
        quantkit.generate_file(model, prompts, tmp_path / "out", progress=progress, **given)
    made = quantkit.generate_file(model, prompts, tmp_path / "out", resume=True, **given)
    assert made.resumed == 2
    assert [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()] == whole


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (request("a", messages=CHAT, tools=[{}]), "a tool is of the wrong type"),
        (
            request("a", messages=CHAT, tools=[TOOL]),
            "the model's chat template does not print tools",
        ),
        (
            request("a", url="/v1/completions", prompt="a", tools=[TOOL]),
            "'tools' in 'body' is not supported",
        ),
        ({"messages": CHAT, "tool_choice": "none"}, "unknown key 'tool_choice'"),
        (
            request("a", messages=CHAT, response_format={"type": "xml"}),
            "'response_format' is not known",
        ),
        (
            request("a", messages=CHAT, frequency_penalty=2.5),
            "frequency_penalty must lie in [-2, 2]",
        ),
        (request("a", messages=CHAT, stream=True), "'stream' in 'body' is not supported"),
        (request("a", messages=CHAT, prompt="x"), "'prompt' in 'body' is not supported"),
        (request("a", messages=CHAT, top_logprobs=2), "'top_logprobs' requires 'logprobs'"),
        (request("a", messages=CHAT, logprobs=2), "'logprobs' is of the wrong type"),
        (
            request("a", messages=CHAT, max_tokens=1, max_completion_tokens=2),
            "max_tokens and max_completion_tokens",
        ),
        (
            request("a", url="/v1/completions", prompt=["a", 1]),
            "prompt 1: 'prompt' is of the wrong type",
        ),
        (
            request("a", url="/v1/embeddings", input="a"),
            "'url' is not known (found '/v1/embeddings'",
        ),
        (request("a", messages=CHAT, temperature=-1), "temperature must"),
        ({**request("a", messages=CHAT), "method": "GET"}, "'method' is not known"),
        ({**request("a", messages=CHAT), "id": 3}, "unknown key 'id' next to 'body'"),
        ({**request("a", messages=CHAT), "custom_id": None}, "'custom_id' is of the wrong type"),
        ({**request("a"), "body": 3}, "'body' is of the wrong type"),
        (
            {"custom_id": "a", "url": "/v1/completions"},
            "'body' is missing (found custom_id, url, expected an object",
        ),
        ({**request("", messages=CHAT)}, "'custom_id' is empty"),
        ({**request("a", messages=CHAT), "url": []}, "'url' is not known (found []"),
        (
            request("a", messages=CHAT, model=3),
            "'model' is of the wrong type (found 3, expected a string)",
        ),
        (request("a", max_tokens=3), "'messages' is missing in 'body' (found max_tokens)"),
        (request("a", url="/v1/completions"), "'prompt' is missing in 'body' (found no keys)"),
        (
            request("a", messages=CHAT, max_tokens=4.0),
            "'max_tokens' is of the wrong type (found 4.0",
        ),
        (request("a", messages=CHAT, max_completion_tokens=10**6), "lower 'max_completion_tokens'"),
        (
            request("a", messages=CHAT, logprobs=True, top_logprobs=101),
            "top_logprobs is out of range",
        ),
        (request("first", messages=CHAT), "'custom_id' is the same as in line 1"),
    ],
)
def test_what_cannot_be_honoured_is_named_with_its_line(
    line: dict[str, Any], words: str, model: Path, tmp_path: Path
) -> None:
    prompts = written(tmp_path / "a.jsonl", request("first", messages=CHAT), line)
    with pytest.raises(RequestError) as caught:
        quantkit.generate_file(model, prompts, tmp_path / "out")
    assert str(caught.value).startswith(f"{prompts}:2: ")
    assert words in str(caught.value)


def test_requests_are_answered_on_stdout_next_to_other_lines(
    model: Path, tmp_path: Path, capfd: Capture
) -> None:
    prompts = written(
        tmp_path / "a.jsonl", request("x", messages=CHAT, max_tokens=2), {"prompt": "The", "id": 5}
    )
    code, out, err = run(
        capfd, "generate", model, "--prompts", prompts, "--output", "-", "--max-new-tokens", "2"
    )
    assert code == 0, err
    first, second = sorted(map(json.loads, out.splitlines()), key=lambda one: "index" in one)
    assert (first["custom_id"], second["id"]) == ("x", 5)


def test_a_list_of_prompts_has_one_answer_with_the_choices_of_each(
    model: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_tokens": 3, "n": 2, "temperature": 1, "seed": 3, "logprobs": 1}
    prompts: list[Any] = ["We hold these", [1, 20, 30], "The"]
    lines = [
        request(str(number), url="/v1/completions", prompt=one, **options)
        for number, one in enumerate(prompts)
    ]
    together = request("all", url="/v1/completions", prompt=prompts, **options)
    (first, *alone, last) = answers(
        model, tmp_path, "in", together, *lines, together | {"custom_id": "again"}
    )
    assert first["response"]["body"]["choices"] == last["response"]["body"]["choices"]
    body = first["response"]["body"]
    expected = [choice for one in alone for choice in one["response"]["body"]["choices"]]
    assert body["choices"] == [{**choice, "index": index} for index, choice in enumerate(expected)]
    for key, value in body["usage"].items():
        assert value == sum(one["response"]["body"]["usage"][key] for one in alone)


def test_a_bad_prompt_of_a_list_is_named_with_its_line(model: Path, tmp_path: Path) -> None:
    prompts = written(
        tmp_path / "in.jsonl", REQUESTS[0], request("x", url="/v1/completions", prompt=["a", ""])
    )
    with pytest.raises(RequestError) as refused:
        quantkit.generate_file(model, prompts, tmp_path / "out", device="cpu")
    assert (refused.value.argument, refused.value.problem) == ("prompt", "prompt 1: is empty")
    assert str(refused.value.path) == f"{prompts}:2"
    assert not (tmp_path / "out").exists()
