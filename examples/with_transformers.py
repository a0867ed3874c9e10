"""Run a folder that quantkit wrote in transformers: python with_transformers.py MODEL

Quantized folders need `pip install compressed-tensors` besides.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
prompt = tokenizer("My fellow citizens", return_tensors="pt")
tokens = model.generate(**prompt, max_new_tokens=30, do_sample=False)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
