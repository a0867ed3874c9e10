"""Hold our tokenizers against llama.cpp's, by files of a vocabulary alone.

    .venv/bin/python scripts/peers/peer_gguf_tokenizer.py train FOLDERS --text FILE
    .venv/bin/python scripts/peers/peer_gguf_tokenizer.py write OUT FOLDER... --text FILE
    PYTHON scripts/peers/peer_gguf_tokenizer.py tokenize OUT
    .venv/bin/python scripts/peers/peer_gguf_tokenizer.py compare OUT

The first trains byte-level tokenizers, one for each way to cut texts that we know, on text that is
not cut: their tokens go across the cuts, so that each place where a text is cut otherwise shows.
The second makes a GGUF file of each folder's tokenizer, and texts. The third, with a PYTHON that
has llama-cpp-python, lets llama.cpp tokenize them. The last says where it differs from the folder,
and from what we read back from the file.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared import llama

LINES = 2000
SHOWN = 60
VOCABULARY = 6000
MARKS = ("<s>", "<|im_end|>", "<|im_start|>")
TEXTS = "texts.json"
SPECIALS = (False, True)
CONTEXT = {  # what llama.cpp requires before it looks at the vocabulary
    "context_length": 128,
    "embedding_length": 64,
    "block_count": 1,
    "feed_forward_length": 64,
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
BLOCKS = (
    (0x20, 0x7E),
    (0xA0, 0x17F),
    (0x300, 0x36F),
    (0x370, 0x3FF),
    (0x400, 0x4FF),
    (0x5D0, 0x5EA),
    (0x620, 0x64A),
    (0x900, 0x97F),
    (0xE00, 0xE3A),
    (0x1100, 0x11FF),
    (0x2000, 0x206F),
    (0x2150, 0x218B),
    (0x2200, 0x22FF),
    (0x3000, 0x30FF),
    (0x4E00, 0x9FA0),
    (0xAC00, 0xD7A3),
    (0xFF01, 0xFF5E),
    (0x1F300, 0x1FAFF),
    (0x0, 0x1F),
)
PIECES = (
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "'s",
    "'LL",
    "12",
    "1234567",
    "é",
    "e\u0301",
    "the",
    " The",
    "\u2581",
    "👩‍🚀",
    "\u00a0",
)
SPELLED = (
    "<s>",
    "</s>",
    "<|im_end|>",
    "<tool_call>",
    "[PAD7]",
    "<0x41>",
    "<unk>",
    "<end_of_turn>",
    "<|eot_id|>",
)


def texts(sources: list[Path], pieces: tuple[str, ...] = PIECES, seed: int = 0) -> list[str]:
    """Lines of real texts, and as many of random letters of many scripts."""
    rng = random.Random(seed)
    lines = [
        line
        for source in sources
        for line in source.read_text(errors="ignore").splitlines()
        if line.strip()
    ]
    real = rng.sample(lines, min(LINES // 2, len(lines)))
    made = []
    while len(made) < LINES - len(real):
        low, high = rng.choice(BLOCKS)
        parts = [
            rng.choice(pieces)
            if rng.random() < 0.3
            else "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 6)))
            for _ in range(rng.randint(1, 12))
        ]
        made.append("".join(parts))
    return [*real, *made]


def train(out: Path, sources: list[Path]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from quantkit.text.pipeline import NAMES, patterns_by_name, pre_tokenizer

    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=16,
    )
    engine.train_from_iterator(
        [line for seed in range(1, 20) for line in texts(sources, seed=seed)], trainer
    )
    engine.add_special_tokens(list(MARKS))
    engine.add_tokens(["<tool_call>"])
    for name in NAMES:
        patterns, whole = patterns_by_name(name)
        raw = json.loads(engine.to_str())
        raw["pre_tokenizer"] = pre_tokenizer(patterns)
        raw["model"]["ignore_merges"] = whole
        folder = out / name
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text(json.dumps(raw))
        settings = {"bos_token": MARKS[0], "eos_token": MARKS[1]}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write(out: Path, folders: list[Path], sources: list[Path]) -> None:
    from quantkit.files.gguf_io import build_header
    from quantkit.text.export import tokenizer_metadata
    from quantkit.text.tokenizer import load_tokenizer

    out.mkdir(parents=True, exist_ok=True)
    lines = texts(sources, PIECES + SPELLED)
    for folder in folders:
        rows = load_tokenizer(folder).vocab_size + 7
        metadata, notes = tokenizer_metadata(folder, rows)
        architecture = {f"llama.{key}": value for key, value in CONTEXT.items()}
        whole = {
            "general.architecture": "llama",
            **architecture,
            "llama.vocab_size": rows,
            **metadata,
        }
        (out / f"{folder.name}.gguf").write_bytes(build_header(whole, []))
        (out / f"{folder.name}.folder").write_text(str(folder))
        for note in notes:
            print(note)
    (out / TEXTS).write_text(json.dumps(lines))


def tokenize(out: Path) -> None:
    """Write what llama.cpp makes of the texts, for each file."""
    import llama_cpp

    llama.silence()
    lines = json.loads((out / TEXTS).read_text())
    for path in sorted(out.glob("*.gguf")):
        settings = llama_cpp.llama_model_default_params()
        settings.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if not model:
            sys.exit(f"{path}: llama.cpp does not load it")
        vocab = llama_cpp.llama_model_get_vocab(model)
        answers: dict[str, object] = {}
        for special in SPECIALS:
            answers[str(special)] = [
                llama.tokenize(vocab, line, specials=special) for line in lines
            ]
        ends = llama.list_end_tokens(vocab)
        answers["ends"] = ends
        path.with_suffix(".ids").write_text(json.dumps(answers))
        print(f"{path.name}: {llama_cpp.llama_vocab_n_tokens(vocab)} tokens, ends {ends}")


def compare(out: Path) -> None:
    from quantkit.base.json_values import read_json
    from quantkit.text.text_folder import locate_or_extract_text_folder
    from quantkit.text.tokenizer import load_tokenizer

    lines = json.loads((out / TEXTS).read_text())
    for path in sorted(out.glob("*.gguf")):
        theirs = json.loads(path.with_suffix(".ids").read_text())
        folder = Path(path.with_suffix(".folder").read_text())
        for name, source in (("file", path), ("folder", folder)):
            tokenizer = load_tokenizer(source)
            for special in SPECIALS:
                if special and tokenizer.special_tokens is None:
                    continue
                wrong = [
                    line
                    for line, ids in zip(lines, theirs[str(special)], strict=True)
                    if tokenizer.encode(line, specials=special) != ids
                ]
                print(
                    f"{path.stem}, {name}, {special=}: {len(wrong)} of {len(lines)} differ",
                    *(repr(line[:SHOWN]) for line in wrong[:3]),
                )
        ends = read_json(locate_or_extract_text_folder(path) / "generation_config.json")[
            "eos_token_id"
        ]
        print(f"{path.stem}: ends {sorted(ends)}, llama.cpp's {theirs['ends']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("train", "write", "tokenize", "compare"))
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--text", type=Path, action="append", default=[])
    options = parser.parse_args()
    if options.step == "train":
        train(options.out, options.text)
    elif options.step == "write":
        write(options.out, options.folders, options.text)
    elif options.step == "tokenize":
        tokenize(options.out)
    else:
        compare(options.out)


if __name__ == "__main__":
    main()
