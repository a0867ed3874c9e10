"""Tiny random models with the widths, heads and tokenizers that published models have.

Toy widths such as 64 and toy vocabularies hide what breaks on published files: rows that 256 does
not divide, heads that are wider than the model, padded embeddings, and vocabularies with unusual
tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import oracle
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

from quantkit.data.files import gate_texts

PADDING = 37  # rows of the embedding that no token has
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TURNS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}\nCall one within"
    ' <tool_call></tool_call>:\n{"name": <name>, "arguments": <object>}<|im_end|>\n{% endif %}{%'
    " for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}{% for"
    ' call in message.tool_calls or [] %}<tool_call>\n{"name": "{{ call.function.name }}",'
    ' "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{%'
    " endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_TURNS = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ 'model' if message.role =="
    " 'assistant' else message.role }}\n{{ message.content | trim }}<end_of_turn>\n{% endfor %}{%"
    " if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLAMA2_TURNS = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{"
    " message.content }} [/INST]{% else %} {{ message.content }} {{ eos_token }}{% endif %}{%"
    " endfor %}"
)

HTML_END = "</s>"
"""The tag that ends struck-out text in HTML: an ordinary token of Qwen and Gemma, the end of a
string for Llama 2.
"""
SPACES = [("\u0120", "\u0120"), ("\u0120\u0120", "\u0120\u0120")]
"""Merges of two and four spaces, in the letters that stand for bytes."""

TEXTS = [
    "",
    " ",
    "  two  spaces,   three    four\n\n\n\nand lines\t\ttabs ",
    "The cat's whiskers aren't 12345.67!\r\n\r\n\tx",
    "<p>some <s>struck</s> text</s></p> <table><tr></tr></table>",
    "Größe e\u0301 \u00e9 \u2167 \ufb01 \u212b",
    "Москва, 日本語のテキスト, हिन्दी",
    "\U0001f469\u200d\U0001f680\U0001f1e9\U0001f1ea",
    "\x00\x01\x7f a\u2581b <0x41>",
    "<unused3> [PAD7] <tool_call>{}</tool_call> <think>",
    "def f(x):\n    if x:\n        return  x\n",
    "x" * 90,
]
"""Strings that real vocabularies cut in other ways than toys."""


@dataclass(frozen=True)
class Shape:
    """A family's settings as a published model has them, with few layers, and the kind of its
    tokenizer.

    Attributes:
        model: the published model that has these widths.
        ends: more end tokens in config.json than the tokenizer's EOS.
    """

    model: str
    model_type: str
    tokenizer: str
    settings: dict[str, Any] = field(default_factory=dict)
    ends: tuple[str, ...] = ()


SHAPES = {
    "smollm": Shape(
        "SmolLM2-135M",
        "llama",
        "smollm",
        {
            "hidden_size": 576,
            "intermediate_size": 512,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": Shape(
        "Qwen2.5-0.5B",
        "qwen2",
        "qwen",
        {
            "hidden_size": 896,
            "intermediate_size": 608,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": Shape(
        "Gemma 3 270M",
        "gemma3_text",
        "gemma",
        {
            "hidden_size": 640,
            "intermediate_size": 512,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
        ("<end_of_turn>",),
    ),
    "llama2": Shape(
        "Llama 2's tokenizer",
        "llama",
        "llama2",
        {
            "hidden_size": 640,
            "intermediate_size": 352,
            "num_attention_heads": 10,
            "num_key_value_heads": 10,
            "tie_word_embeddings": False,
        },
    ),
}
"""By name.

Feed-forwards are narrower than the published ones: of rows that 256 does divide, and that it does
not.
"""


def make_model(folder: Path, name: str) -> Path:
    """Write a random model of a shape with its tokenizer and chat template, and return its
    folder.
    """
    shape = SHAPES[name]
    folder.mkdir(parents=True)
    write_tokenizer(folder, shape.tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(shape.ends))]
    settings = {
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "vocab_size": len(tokenizer) + PADDING,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ends if shape.ends else ends[0],
        **shape.settings,
    }
    model = oracle.make(shape.model_type, **settings)
    if shape.model_type.startswith("gemma"):
        # It multiplies embeddings by the root of the width: random ones would drown what the layers
        # compute.
        model.model.embed_tokens.weight.data.mul_(0.1)
    return oracle.save(model.bfloat16(), folder)  # as published models are


def write_tokenizer(folder: Path, kind: str) -> None:
    """Write tokenizer.json and tokenizer_config.json of a kind."""
    tokenizer, settings = TOKENIZERS[kind]()
    tokenizer.save(str(folder / "tokenizer.json"))
    defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    text = json.dumps({**defaults, **settings}, indent=2)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def build_smollm() -> tuple[Tokenizer, dict[str, Any]]:
    """Build a tokenizer of SmolLM2's kind: control tokens come first, and BOS starts a turn but
    no string.
    """
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>"]
    vocab, merges = train_bytes(control, SPACES)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(control)
    return tokenizer, {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHATML,
    }


def build_qwen() -> tuple[Tokenizer, dict[str, Any]]:
    """Build a tokenizer of Qwen's kind: NFC, no BOS, ordinary tokens that look like control tokens,
    and added tokens that are not special.
    """
    # Qwen's vocabulary has such a token too, although no text is cut so that it appears.
    vocab, merges = train_bytes([], [*SPACES, ("<", "/"), ("</", "s"), ("</s", ">")])
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_pad|>"])
    names = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_call>s")
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    settings = {
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "chat_template": QWEN_TURNS,
    }
    return tokenizer, settings


def build_gemma() -> tuple[Tokenizer, dict[str, Any]]:
    """Build a tokenizer of Gemma 3's kind: added tokens in the middle, of runs of spaces and of
    HTML; bytes follow.
    """
    control = ["<pad>", "<eos>", "<bos>", "<unk>"]
    turns = ["<start_of_turn>", "<end_of_turn>"]
    unused = [f"<unused{number}>" for number in range(8)]
    lines = ["\n" * count for count in range(2, 6)]
    spaces = ["\u2581" * count for count in range(2, 9)]
    tags = ["<table>", "<tr>", "</tr>", "</table>", "<s>", HTML_END]
    ordinary = ["<mask>", "[multimodal]", *unused[:4], *lines, *spaces, *tags, *unused[4:]]
    vocab, merges = train_pieces(
        [*control, *ordinary[:6], *turns, *ordinary[6:]], [*lines, *spaces]
    )
    tokenizer = build_sentencepiece_kind(vocab, merges)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.add_special_tokens(control + turns)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ordinary])
    put_first(tokenizer, "<bos>")
    settings = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "chat_template": GEMMA_TURNS,
    }
    return tokenizer, settings


def build_llama2() -> tuple[Tokenizer, dict[str, Any]]:
    """Build a tokenizer of Llama 2's kind: a space before each string, and `HTML_END` as the
    true end token.
    """
    control = ["<unk>", "<s>", HTML_END]
    vocab, merges = train_pieces(control, [])
    tokenizer = build_sentencepiece_kind(vocab, merges)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    put_first(tokenizer, "<s>")
    settings = {
        "bos_token": "<s>",
        "eos_token": HTML_END,
        "unk_token": "<unk>",
        "add_bos_token": True,
        "chat_template": LLAMA2_TURNS,
    }
    return tokenizer, settings


TOKENIZERS = {
    "smollm": build_smollm,
    "qwen": build_qwen,
    "gemma": build_gemma,
    "llama2": build_llama2,
}


def build_sentencepiece_kind(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """Build a tokenizer that merges pieces, and falls back to bytes."""
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def put_first(tokenizer: Tokenizer, token: str) -> None:
    """Have a tokenizer put a token before each string."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token}:1 $B:1",
        special_tokens=[(token, tokenizer.token_to_id(token))],
    )


def train_bytes(
    control: list[str], pairs: list[tuple[str, str]]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train merges of bytes on the included text, after control tokens; further pairs are merged
    last.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=control,
        show_progress=False,
    )
    tokenizer.train_from_iterator(gate_texts().values(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    merges = [tuple(pair) for pair in model["merges"]]
    for pair in pairs:
        if pair not in merges:
            merges.append(pair)
            vocab.setdefault("".join(pair), len(vocab))
    return vocab, merges


def train_pieces(first: list[str], runs: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train pieces on the included text, after some tokens and all bytes.

    As in a sentencepiece model, any two neighbors merge whose union is a piece, the piece with the
    lowest id first.

    Args:
        first: tokens with the lowest ids; no text is cut into them by merges, except into runs.
        runs: runs of one character, which are merged from shorter ones before anything else, the
            longest first.
    """
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    head = [*first, *byte_tokens]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=len(head) + 400, special_tokens=head, show_progress=False
    )
    tokenizer.train_from_iterator(gate_texts().values(), trainer)
    vocab: dict[str, int] = tokenizer.get_vocab()
    pieces = sorted(set(vocab) - set(head), key=lambda piece: vocab[piece])
    merges = []
    for piece in [*reversed(runs), *pieces]:
        for cut in range(1, len(piece)):
            if piece[:cut] in vocab and piece[cut:] in vocab:
                merges.append((piece[:cut], piece[cut:]))
    return vocab, merges
