"""Use a server with OpenAI's client: python openai_client.py [URL]

Install it with `pip install openai`, and start the server with `quantkit serve MODEL`. If the
server has a key, set OPENAI_API_KEY to it.
"""

import math
import os
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Name three rivers."}]

print("--- a whole answer")
answer = client.chat.completions.create(
    model=model, messages=messages, max_tokens=60, temperature=0
)
print(answer.choices[0].message.content)
print(f"({answer.usage.completion_tokens} tokens, ended by {answer.choices[0].finish_reason})")

print("--- the same, as it is generated")
with client.chat.completions.create(
    model=model,
    messages=messages,
    max_tokens=60,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
) as stream:
    for piece in stream:
        if piece.choices:
            print(piece.choices[0].delta.content or "", end="", flush=True)
print()

print("--- how likely each token was, and what else was likely")
answer = client.chat.completions.create(
    model=model, messages=messages, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
)
for token in answer.choices[0].logprobs.content:
    others = ", ".join(
        f"{other.token!r} {math.exp(other.logprob):.3f}" for other in token.top_logprobs
    )
    print(f"{token.token!r} {math.exp(token.logprob):.3f} ({others})")

print("--- an answer that is JSON of a schema")
schema = {
    "type": "object",
    "properties": {"river": {"type": "string", "maxLength": 30}, "long": {"type": "boolean"}},
    "required": ["river", "long"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=messages,
    max_tokens=400,
    temperature=0,
    response_format={"type": "json_schema", "json_schema": {"name": "river", "schema": schema}},
)
print(answer.choices[0].message.content)

print("--- a prompt continued, with options that only some servers have")
answer = client.completions.create(
    model=model,
    prompt="The capital of France is",
    max_tokens=8,
    seed=1,
    extra_body={"top_k": 20, "min_p": 0.05},
)
print(answer.choices[0].text)
