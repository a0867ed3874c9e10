"""What scripts for Meta's own code do: python meta_interface.py MODEL TOKENIZER, or the same under
torchrun

MODEL is a folder of original shards, or any other that quantkit reads; TOKENIZER its
tokenizer.model.
"""

import sys

from quantkit import Llama

llama = Llama.build(
    ckpt_dir=sys.argv[1], tokenizer_path=sys.argv[2], max_seq_len=256, max_batch_size=4
)
prompts = ["My fellow citizens", "The duty of Congress is"]
dialogs = [[{"role": "user", "content": "What is the duty of Congress?"}]]
texts = llama.text_completion(prompts, temperature=0.6, top_p=0.9, max_gen_len=20)
answers = llama.chat_completion(dialogs, max_gen_len=20)
if llama.model.group.is_rank0:  # all processes have the results
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"{prompt} ==> {text['generation']}")
    print(answers[0]["generation"])
