"""Talk with an instruct model: python chat.py MODEL [llama2|llama3]

The format is for folders of Meta's, which do not say which one they were trained for.
"""

import sys

import quantkit

folder, format = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
model, tokenizer = quantkit.load(folder)
session = quantkit.ChatSession(
    model,
    tokenizer,
    quantkit.chat_format(folder, tokenizer, format),
    system="You answer in one sentence.",
    max_new_tokens=200,
    **quantkit.sampling_defaults(folder),
)

print("> ", end="", flush=True)
for question in sys.stdin:
    for piece in session.ask(question.strip()):
        print(piece, end="", flush=True)
    print("\n> ", end="", flush=True)
