"""Choose among answers by their log-probabilities: python multiple_choice.py MODEL"""

import sys

import quantkit

QUESTION = "The capital of France is"
CHOICES = [" Paris.", " Berlin.", " banana."]

model, tokenizer = quantkit.load(sys.argv[1])
found = quantkit.generate_batch(
    model,
    [QUESTION + choice for choice in CHOICES],
    tokenizer=tokenizer,
    max_new_tokens=0,
    echo=True,
    logprobs=0,
)
question = len(
    tokenizer.encode(QUESTION)
)  # choices begin with a space, so its tokens are the same before each
scores = []
for choice, one in zip(CHOICES, found, strict=True):
    scores.append(sum(one.logprobs.tokens[question:]) / len(choice.encode()))
    print(f"{scores[-1]:7.3f} nats a byte {choice}")
print("best:", CHOICES[scores.index(max(scores))].strip())
