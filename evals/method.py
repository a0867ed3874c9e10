"""What an evaluation measured and how, in words."""

from __future__ import annotations

from quantkit.evals.positions import position_method
from quantkit.evals.results import Evaluation, Row
from quantkit.evals.timing import NEW_TOKENS, PROMPT_TOKENS, RUNS

_DEVICES = {"cpu": "the CPU", "cuda": "a GPU"}


def method(found: Evaluation) -> list[str]:
    """A list in Markdown: units, errors, BOS, windows, strides, hashes of texts, dtypes and backends."""
    lines = [*found.notes, f"Made with {', '.join(f'{name} {one}' for name, one in found.versions.items())}."]
    if found.texts:
        lines += _perplexity(found)
    if found.reference is not None and found.texts:
        lines.append(
            f"KL: of {found.reference}'s distribution of the next token from the model's, per token, in nats. Top-1:"
            " the share of tokens for which both hold the same one likeliest. Both over all positions of token ppl's"
            " windows. Ppl ratio: of token ppl."
        )
        lines.append(
            "±: one standard error of a mean over tokens, from the spread between 20 stretches of equal length that"
            " the text is cut into (batch means), as neighbouring tokens are not independent. That of the ppl ratio is"
            " from the differences of loss token by token (delta method). It takes the text's tokens as a sample of"
            " that text: another text may differ by several times as much, which only measuring on several shows. With"
            " three texts or more there is their mean, with the standard error from the spread between them."
            " Figures without an error are those of this very text: four digits, or all before the point; quantiles"
            " two."
        )
    lines += position_method(found)
    lines += [
        f"{name}: sha256 {text.sha256}, read {text.kind}; documents {text.documents}, words {text.words}, bytes"
        f" {text.bytes}, tokens {_each({row.name: str(row.texts[name].tokens) for row in found.rows})}."
        for name, text in found.texts.items()
    ]
    if found.rows[0].tasks:
        lines.append(_tasks(found))
    if found.rows[0].speed:
        lines.append(
            f"tok/s: greedy decoding of {NEW_TOKENS} tokens after a prompt of {PROMPT_TOKENS}, one sequence, the prompt"
            f" and the first token left out, median of {RUNS}. {_each({row.name: _pace(row) for row in found.rows})}."
        )
    return [f"- {line}" for line in lines]


def _perplexity(found: Evaluation) -> list[str]:
    rows = found.rows
    rolling = _each({row.name: f"{row.rolling_window} tokens" for row in rows})
    begins = _each({row.name: f"token {row.prefix}{' and the BOS' * row.adds_bos}" for row in rows})
    return [
        "Perplexity and KL: float32 on the CPU, one decoder block at a time; quantized weights dequantized (backend"
        " reference).",
        "Word ppl: exp of the loss in nats per word. Bits/byte: the loss in bits per byte. Words are what lies between"
        " white space; both are counted in the raw text, as in the wikitext task of lm-evaluation-harness. Each"
        f" document is run by itself in rolling windows; window and stride: {rolling}. The last window reaches back to"
        " full length and scores what is left, so that every token is predicted once. A document's first token is"
        f" predicted from {begins} that the tokenizer puts before it"
        + (", which is predicted too." if any(row.adds_bos for row in rows) else "."),
        "Token ppl: exp of the loss in nats per token. The raw text is one stream of tokens, with BOS at its beginning"
        f" if the tokenizer puts it there and nowhere else, in windows of {found.window} tokens, stride {found.window};"
        " a shorter rest is left out, and a window's first token is not predicted. So do papers on GPTQ.",
    ]


def _tasks(found: Evaluation) -> str:
    asked = ", ".join(
        f"{name} ({_or_varied(score.shots)} shots, {_or_varied(score.documents)} questions)"
        for name, score in found.rows[0].tasks.items()
    )
    backends = _each({row.name: _backends(row.task_backends) for row in found.rows})
    return (
        f"Tasks: by lm-evaluation-harness, {asked}; float32 on {_DEVICES.get(found.device, found.device)}, {backends};"
        " ± is the harness's standard error over the questions."
    )


def _pace(row: Row) -> str:
    if row.speed is None:
        return "not measured"
    return f"{row.speed.dtype}, {row.speed.device}, {row.speed.threads} threads, {_backends(row.speed.backends)}"


def _backends(names: list[str]) -> str:
    return f"backend {' and '.join(names)}" if names else "no quantized layers"


def _each(values: dict[str, str]) -> str:
    """What all models share, or what each has."""
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    shared: dict[str, list[str]] = {}
    for name, value in values.items():
        shared.setdefault(value, []).append(name)
    return "; ".join(f"{', '.join(names)}: {value}" for value, names in shared.items())


def _or_varied(value: int | None) -> str:
    return "several" if value is None else str(value)
