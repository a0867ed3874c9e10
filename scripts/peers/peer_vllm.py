"""vLLM on a CPU, to be compared with ours by `measure_batch.py`.

    PYTHON scripts/peers/peer_vllm.py FOLDER --length 32 --sequences 16

PYTHON has vLLM for CPUs. Says 0; then, for each line on standard input, new tokens a second of all
its prompts together, after their first ones. Its log goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # steps can be timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    from vllm import LLM, SamplingParams

    llm = LLM(
        model=options.folder,
        dtype="bfloat16",
        max_model_len=max(512, options.length),
        skip_tokenizer_init=True,
        max_num_seqs=options.sequences,
        enforce_eager=options.eager,
        enable_prefix_caching=False,
    )
    print(0, file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        params = SamplingParams(
            temperature=0, max_tokens=request["new"], ignore_eos=True, detokenize=False
        )
        tokens = dict.fromkeys((f"{number}-{place}" for place in range(len(request["prompts"]))), 0)
        for name, prompt in zip(tokens, request["prompts"], strict=True):
            llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)

        def step(tokens: dict[str, int] = tokens) -> None:
            for output in llm.llm_engine.step():
                tokens[output.request_id] = len(output.outputs[0].token_ids)

        while not all(tokens.values()):
            step()
        there, started = sum(tokens.values()), time.perf_counter()
        while llm.llm_engine.has_unfinished_requests():
            step()
        print(
            (sum(tokens.values()) - there) / (time.perf_counter() - started),
            file=answers,
            flush=True,
        )


if __name__ == "__main__":
    main()
