"""Continue the prompts of a file, several at a time: python batch_file.py MODEL PROMPTS.jsonl
OUT.jsonl
"""

import json
import sys

import quantkit

folder, prompts, results = sys.argv[1:]
model, tokenizer = quantkit.load(folder)

with open(prompts) as lines:
    asked = [json.loads(line)["prompt"] for line in lines]

found = quantkit.generate_batch(
    model, asked, tokenizer=tokenizer, max_new_tokens=40, stop="\n\n", batch_size=16
)

with open(results, "w") as out:
    for prompt, one in zip(asked, found, strict=True):
        line = {"prompt": prompt, "text": one.text, "finish_reason": one.finish_reason}
        out.write(json.dumps(line, ensure_ascii=False) + "\n")
