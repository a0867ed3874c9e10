"""Everything that a conversation says reaches the prompt, or the conversation is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from case_names import case
from paths import DATA

from quantkit.errors import CheckpointError, RequestError
from quantkit.text import template_process
from quantkit.text.chat import Llama2Chat, Llama3Chat, TemplateChat
from quantkit.text.chat_template import ChatTemplate
from quantkit.text.template_process import Budget

Messages = list[dict[str, Any]]

QWEN = (DATA / "templates/qwen.jinja").read_text()
ANY_ROLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant', 'tool') %}<{{ m.role"
    " }}>{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}({{"
    " call.function.arguments | tojson }}){% endfor %}{% endif %}{% endfor %}{% if tools"
    " %}<tools>{{ tools | tojson }}{% endif %}"
)
# As Llama 3.1's template: text next to a call is left out, and a second call too.
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}<call>{{ m.tool_calls[0].function | tojson }}"
    "{% else %}<{{ m.role }}>{{ m.content | trim }}{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}{%"
    " endfor %}"
)
FIRST_PART = PARTS.replace("part.text", "part.text if loop.first")

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def call(name: str = "weather", arguments: Any = None, **fields: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "arguments": arguments or {"city": "Oslo"}},
        **fields,
    }


def template_chat(source: str) -> TemplateChat:
    return TemplateChat(lambda with_tools: ChatTemplate(source), None)  # type: ignore[arg-type]


def dropped_place(source: str, messages: Messages, **options: Any) -> str:
    """Return what the error says was dropped."""
    with pytest.raises(RequestError) as caught:
        template_chat(source).text(messages, **options)
    match = re.search(r"\b(messages\[\S+|tools\S*|documents)", caught.value.problem)
    assert match is not None, caught.value
    return match[1]


@pytest.mark.parametrize("role", ["critic", "Assistant", "function", "ipython"])
def test_a_message_of_a_role_that_the_template_does_not_know_is_refused(role: str) -> None:
    message = {"role": role, "content": "one two three"}
    assert dropped_place(KNOWN_ROLES, [message, user("Hi")]) == "messages[0].content"
    assert (
        dropped_place(KNOWN_ROLES, [user("Hi"), assistant("Yes"), message]) == "messages[2].content"
    )
    assert "one two three" in template_chat(ANY_ROLE).text([message, user("Hi")])


def test_a_dropped_message_is_found_although_another_says_the_same() -> None:
    messages = [user("Hi"), {"role": "critic", "content": "Hi"}, user("Hi there")]
    assert dropped_place(KNOWN_ROLES, messages) == "messages[1].content"


def test_a_constant_template_prints_nothing_of_a_message() -> None:
    assert dropped_place("Hi", [user("Hi")]) == "messages[0].content"


CALLS: Messages = [
    user("W?"),
    assistant("", tool_calls=[call()]),
    {"role": "tool", "content": "18 C"},
]


# A template, a message of which it drops something, and the place of what is dropped.
DROPPED: list[tuple[str, dict[str, Any], str]] = [
    (ANY_ROLE, assistant("", tool_calls=[call()]), "messages[1].tool_calls[0].function.name"),
    (ANY_ROLE, assistant(None, tool_calls=[call()]), "messages[1].tool_calls[0].function.name"),
    (
        ANY_ROLE,
        assistant("Let me see.", tool_calls=[call()]),
        "messages[1].tool_calls[0].function.name",
    ),
    (QWEN, assistant("", tool_calls=[call()]), "messages[1].tool_calls[0].function.name"),
    (
        ONE_CALL,
        assistant("", tool_calls=[call(), call("time")]),
        "messages[1].tool_calls[1].function.name",
    ),
    (
        KNOWN_ROLES.replace("{{ call.function.arguments | tojson }}", ""),
        assistant("", tool_calls=[call()]),
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        ANY_ROLE,
        assistant(None, tool_calls=[call()["function"]]),
        "messages[1].tool_calls[0].name",
    ),
    (
        KNOWN_ROLES,
        assistant(None, function_call=call()["function"]),
        "messages[1].function_call.name",
    ),
    (
        ANY_ROLE,
        assistant(
            "", tool_calls=[{"id": "call_now_0", "function": {"name": "now", "arguments": {}}}]
        ),
        "messages[1].tool_calls[0].function.name",
    ),
    (
        ANY_ROLE,
        assistant("", tool_calls=[{"function": {"name": "on", "arguments": {}}}]),
        "messages[1].tool_calls[0].function.name",
    ),
    (
        ANY_ROLE,
        assistant("", tool_calls=[{"type": "custom", "custom": {"name": "run", "input": "ls"}}]),
        "messages[1].tool_calls[0].custom.name",
    ),
    (ANY_ROLE, assistant("", tool_calls='[{"name": "weather"}]'), "messages[1].tool_calls"),
    (ANY_ROLE, assistant("", tool_calls=['{"name": "weather"}']), "messages[1].tool_calls[0]"),
    (
        "{% for m in messages if not m.tool_calls %}{{ m.content }}{% endfor %}",
        assistant("Let me see.", tool_calls=[{"id": "1"}]),
        "messages[1].content",
    ),
    (KNOWN_ROLES, assistant(None, refusal="No."), "messages[1].refusal"),
    (KNOWN_ROLES, assistant(None, audio={"id": "audio_1"}), "messages[1].audio"),
]


def test_what_an_answer_did_is_refused_if_it_is_dropped() -> None:
    for source, message, place in DROPPED:
        with case(message):
            assert dropped_place(source, [user("W?"), message, user("So?")]) == place


def test_a_dropped_message_is_found_although_the_template_refuses_other_contents() -> None:
    source = (
        "{% if not messages[0].content.startswith('Hello') %}{{ raise_exception('no') }}{% endif %}"
        + KNOWN_ROLES
    )
    for content in ("ell", "USER", "Hello"):  # which the prompt has anyway
        messages = [user("Hello"), {"role": "critic", "content": content}, user("Hi")]
        assert dropped_place(source, messages) == "messages[1].content"
    assert (
        template_chat(source)
        .text([user("Hello"), assistant("ell"), user("Hello")])
        .endswith("<user>Hello")
    )


def test_a_message_that_is_nested_too_deep_is_refused() -> None:
    content: list[Any] = []
    for _ in range(5000):
        content = [content]
    with pytest.raises(RequestError):
        template_chat(ANY_ROLE).text([user("Hi"), {"role": "tool", "content": content}])


def test_parts_of_a_message_are_looked_for_one_by_one() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template_chat(PARTS).text([user(parts)]) == "<user>onetwo"
    assert dropped_place(FIRST_PART, [user(parts)]) == "messages[0].content[1].text"


SYSTEM_PARTS = {
    "role": "system",
    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
}


@pytest.mark.parametrize("system", ["m.content[0].text", "m.content + ''"])
def test_parts_are_joined_if_the_template_reads_those_of_other_roles_only(system: str) -> None:
    # as Gemma 3's template, which prints the first part of a system message, and Cogito's, which
    # requires a string
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content"
        f" }}}}{{% elif m.role == 'system' %}}{{{{ {system} }}}}{{% else %}}{{% for part in"
        " m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    parts = SYSTEM_PARTS["content"]
    assert template_chat(source).text([user(parts)]) == "<user>onetwo"
    assert template_chat(source).text([SYSTEM_PARTS, user("Hi")]) == "<system>one\ntwo<user>Hi"


def test_arguments_are_json_for_a_template_that_appends_them_to_a_string() -> None:
    # as DeepSeek V3.1's template, which also requires a content
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ '' + m.content }}{% for call in m.tool_calls or []"
        " %}{{ call.function.name + call.function.arguments }}{% endfor %}{% endfor %}"
    )
    message = assistant(None, tool_calls=[call(arguments={"city": "Tromsø"})])
    text = template_chat(source).text([user("W?"), message, user("So?")])
    assert text == '<user>W?<assistant>weather{"city": "Tromsø"}<user>So?'


def test_a_template_that_refuses_a_conversation_is_quoted() -> None:
    source = "{% if messages | length > 1 %}{{ raise_exception('only one') }}{% endif %}" + PARTS
    with pytest.raises(RequestError) as caught:
        template_chat(source).text([SYSTEM_PARTS, user("Hi")])
    assert "only one" in caught.value.problem


def test_documents_that_the_template_does_not_print_are_refused() -> None:
    documents = [{"title": "Oslo", "text": "It rains."}]
    assert dropped_place(ANY_ROLE, [user("Hi")], documents=documents) == "documents"
    with_documents = (
        ANY_ROLE + "{% for document in documents or [] %}{{ document.text }}{% endfor %}"
    )
    assert (
        template_chat(with_documents).text([user("Hi")], documents=documents) == "<user>HiIt rains."
    )
    assert template_chat(ANY_ROLE).text([user("Hi")], documents=[]) == "<user>Hi"


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        (True, {"tool_calls": [call()]}),
        (True, {"function_call": call()["function"]}),
        ("reasoning_content", {"reasoning_content": "hm"}),
    ],
)
def test_a_message_that_is_continued_says_nothing_after_that(
    field: str | bool, fields: dict[str, Any]
) -> None:
    source = KNOWN_ROLES.replace(
        "{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}{{ m.function_call }}"
    )
    with pytest.raises(RequestError) as caught:
        template_chat(source).text(
            [user("Hi"), assistant("Yes", **fields)], continue_final_message=field
        )
    assert caught.value.argument == "messages"
    begun = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    continued = template_chat(source).text(
        [user("Hi"), begun], continue_final_message="reasoning_content"
    )
    assert continued.endswith("hm")


def test_tools_that_the_template_does_not_print_are_refused() -> None:
    assert dropped_place(ANY_ROLE, [user("Hi")], tools=[WEATHER]) == "tools"
    assert "weather" in template_chat(KNOWN_ROLES).text([user("Hi")], tools=[WEATHER])
    first_tool = ANY_ROLE + "{{ tools[0] | tojson if tools }}"
    other_tool = {"type": "function", "function": {"name": "time"}}
    assert dropped_place(first_tool, [user("Hi")], tools=[WEATHER, other_tool]) == "tools[1]"
    assert "weather" in template_chat(first_tool).text([user("Hi")], tools=[WEATHER])
    only_names = ANY_ROLE + "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    assert template_chat(only_names).text([user("Hi")], tools=[WEATHER]) == "<user>Hiweather"


CHANGED = {
    "trimmed": "{{ m.content | trim }}",
    "in capitals": "{{ m.content | upper }}",
    "in JSON": "{{ m.content | tojson }}",
    "escaped": "{{ m.content | e }}",
    "cut off": "{{ m.content[:2] }}",
    "without spaces": "{{ m.content | replace(' ', '') }}",
    "without thoughts": "{{ m.content.split('</think>')[-1] }}",
    "in lists": "{% if m.content is string %}{{ m.content.split(' ') }}{% endif %}",
    "checked": (
        "{% if not m.content.startswith('Hi') %}{{ raise_exception('no greeting') }}{% endif %}{{"
        " m.content }}"
    ),
    "only checked": (
        "{% if not m.content.startswith('Hi') %}{{ raise_exception('no greeting') }}{% endif %}"
    ),
}


def test_a_template_may_print_contents_in_its_own_way() -> None:
    messages = [user("Hi you\n"), assistant("Hi <&> me"), user("Hi again")]
    for name, printed in CHANGED.items():
        source = "{% for m in messages %}<{{ m.role }}>" + printed + "{% endfor %}"
        expected = ChatTemplate(source).render(messages)
        with case(name):
            assert template_chat(source).text(messages) == expected


SOUND: dict[str, tuple[str, Messages]] = {
    "nothing said": (KNOWN_ROLES, [{"role": "critic", "content": " \n"}, user(""), assistant("")]),
    "no content": (KNOWN_ROLES, [user("Hi"), {"role": "assistant", "reasoning_content": "hm"}]),
    "reasoning": (KNOWN_ROLES, [user("Hi"), assistant("Yes", reasoning_content="hm"), user("So?")]),
    "only thoughts": (QWEN, [user("Hi"), assistant("<think>\nhm\n</think>"), user("So?")]),
    "text next to a call": (
        ONE_CALL,
        [user("W?"), assistant("Let me see.", tool_calls=[call()]), user("So?")],
    ),
    "calls": (
        KNOWN_ROLES,
        [user("W?"), assistant("", tool_calls=[call(), call("time", {"zone": 1})]), user("So?")],
    ),
    "no arguments": (
        KNOWN_ROLES,
        [user("W?"), assistant("", tool_calls=[{"function": {"name": "now", "arguments": {}}}])],
    ),
    "arguments in JSON": (
        KNOWN_ROLES,
        [user("W?"), assistant("", tool_calls=[call(arguments='{"a": 1}')])],
    ),
    "a name in an id": (
        (
            "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.id"
            " }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
        ),
        [user("W?"), assistant("", tool_calls=[call(id="functions.weather:0")])],
    ),
    "a custom tool": (
        ANY_ROLE + "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}",
        [
            user("W?"),
            assistant(
                "", tool_calls=[{"type": "custom", "custom": {"name": "run", "input": "ls"}}]
            ),
        ],
    ),
    "a result in JSON": (KNOWN_ROLES, [*CALLS[:2], {"role": "tool", "content": {"degrees": 18}}]),
    "results in a list": (
        KNOWN_ROLES,
        [*CALLS[:2], {"role": "tool", "content": [{"degrees": 18}]}],
    ),
    "a tuple": (KNOWN_ROLES, [*CALLS[:2], {"role": "tool", "content": ({"degrees": 18},)}]),
    "names": (
        KNOWN_ROLES,
        [{**user("Hi"), "name": "Ann"}, assistant("Yes", refusal=None, annotations=[])],
    ),
    "marks": (KNOWN_ROLES, [user("said0n0e"), assistant("SAID0N1E"), user("tool0n0e said1n")]),
}


def test_a_sound_conversation_is_rendered_as_ever() -> None:
    for name, (source, messages) in SOUND.items():
        with case(name):
            text = template_chat(source).text(messages)
            assert text == ChatTemplate(source).render(messages)


def test_an_answer_that_is_continued_is_printed() -> None:
    messages = [user("Hi"), assistant("Once upon")]
    assert (
        template_chat(KNOWN_ROLES + "</s>")
        .text(messages, continue_final_message=True)
        .endswith("Once upon")
    )
    critic = {"role": "critic", "content": "one"}
    with pytest.raises(RequestError):
        template_chat(KNOWN_ROLES).text([critic, *messages], continue_final_message=True)


def test_a_call_needs_no_content() -> None:
    # The template adds strings, which fails without a content, as in transformers.
    source = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{{ m.tool_calls }}{% endfor %}"
    )
    without = [user("W?"), assistant(None, tool_calls=[call()])]
    blank = [user("W?"), assistant("", tool_calls=[call()])]
    assert template_chat(source).text(without) == ChatTemplate(source).render(blank)
    # A template that can do without one gets none, as in transformers.
    source = (
        "{% for m in messages %}{{ m.content is defined }}{{ m.content }}{{ m.tool_calls }}{%"
        " endfor %}"
    )
    assert template_chat(source).text(without) == ChatTemplate(source).render(without)
    with pytest.raises(RequestError):
        template_chat(source).text([{"role": "user", "content": None}])


DEVELOPER = {"role": "developer", "content": "Be brief."}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("source", [QWEN, KNOWN_ROLES, ANY_ROLE])
def test_a_developer_is_the_system_where_the_template_does_not_know_one(source: str) -> None:
    chat = template_chat(source)
    assert chat.text([DEVELOPER, user("Hi")]) == chat.text([SYSTEM, user("Hi")])
    knows = source.replace("'system'", "'developer'") + "{{ 'developer' }}"
    assert template_chat(knows).text([DEVELOPER, user("Hi")]) == ChatTemplate(knows).render(
        [DEVELOPER, user("Hi")]
    )


class Letters:
    """A tokenizer whose tokens are letters."""

    bos_id, eos_ids = 1, (2,)
    special_tokens: Mapping[str, int] = {
        "<|start_header_id|>": 3,
        "<|end_header_id|>": 4,
        "<|eot_id|>": 5,
    }

    def encode(self, text: str, *, specials: bool = False, bos: bool = True) -> list[int]:
        return [1] * bos + [ord(letter) for letter in text]


@pytest.mark.parametrize("kind", [Llama2Chat, Llama3Chat])
def test_metas_formats_have_no_developer_and_no_calls(kind: Any) -> None:
    chat = kind(Letters())
    assert chat.encode([DEVELOPER, user("Hi")]) == chat.encode([SYSTEM, user("Hi")])
    for said in (
        assistant("", tool_calls=[call()]),
        assistant("", function_call=call()["function"]),
    ):
        with pytest.raises(RequestError):
            chat.encode([user("W?"), said, user("So?")])
    assert chat.encode([user("W?"), assistant("x", tool_calls=[]), user("So?")])


@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_a_long_conversation_is_rendered_twice(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    render = template_process.render

    def counted(source: str, variables: Any, *others: Any) -> dict[str, Any]:
        lengths.append(len(str(variables["messages"])))
        return render(source, variables, *others)

    monkeypatch.setattr(template_process, "render", counted)
    messages = [
        message
        for turn in range(200)
        for message in (user("word " * 99), assistant(f"answer {turn} " * 99))
    ]
    template_chat(KNOWN_ROLES).text(messages, tools=tools)
    assert len(lengths) == 2
    assert lengths[1] < lengths[0] / 5  # without the contents


def test_the_check_shares_the_time_of_a_prompt_and_not_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    render = template_process.render

    def slow(
        source: str, variables: Any, unknown: tuple[str, ...], budget: Budget
    ) -> dict[str, Any]:
        budget.seconds -= 1
        return render(source, variables, unknown, budget)

    monkeypatch.setattr(template_process, "render", slow)
    budget = Budget(seconds=10, length=100)
    template_chat(KNOWN_ROLES).text([user("Hi")], budget=budget)
    assert budget.length == 100 - len("<user>Hi")
    assert 7 < budget.seconds <= 8
    with pytest.raises(CheckpointError):
        template_chat(KNOWN_ROLES).text([user("Hi")], budget=Budget(seconds=1.5))


def test_random_choices_and_the_time_are_no_traces() -> None:
    source = "{{ strftime_now('%f') }}{{ range(99999) | random }}" + KNOWN_ROLES
    assert (
        dropped_place(source, [user("Hi"), {"role": "critic", "content": "one"}])
        == "messages[1].content"
    )


def test_another_template_for_tools_is_no_trace_of_them(tmp_path: Path) -> None:
    chosen = {True: ChatTemplate(KNOWN_ROLES), False: ChatTemplate(ANY_ROLE)}
    chat = TemplateChat(chosen.__getitem__, None)  # type: ignore[arg-type]
    assert "weather" in chat.text([user("Hi")], tools=[WEATHER])
    chosen[True] = ChatTemplate(ANY_ROLE)
    with pytest.raises(RequestError):
        chat.text([user("Hi")], tools=[WEATHER])
