"""Meta's interface: tokens and log-probabilities of its algorithm, its results' shapes, and its
rules at the edges.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import oracle
import pytest
import torch

import quantkit
from quantkit.errors import CheckpointError, QuantkitError, RequestError
from quantkit.jobs.inference.llama import REFUSED
from quantkit.model.decoder import Decoder
from quantkit.text.tokenizer import load_original_tokenizer

LENGTH = 40
CASES = ("llama2", "llama2 int8", "llama3", "llama3 int4")


@pytest.fixture(scope="module")
def folders(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Meta's shards of Llama 2 and 3, two of each, and Hugging Face folders quantized from them."""
    base = tmp_path_factory.mktemp("llama")
    model = oracle.make("llama", vocab_size=516, max_position_embeddings=8192, rope_theta=5e5)
    source = oracle.save(model, base / "source")
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"he", b"the", b" the"]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (source / "tokenizer.model").write_bytes(b"".join(lines))
    quantkit.convert(source, base / "llama3", to="meta", mp=2, source_check=False)
    quantkit.quantize(
        base / "llama3",
        base / "llama3 int4",
        "int4-g32",
        method="rtn",
        accept_quality_loss=True,
        source_check=False,
    )
    quantkit.quantize(demo_model, base / "llama2 int8", "int8")
    assert len(list((base / "llama3").glob("*.pth"))) == len(list(demo_model.glob("*.pth"))) == 2
    return {"llama2": demo_model, **{name: base / name for name in CASES[1:]}}


def _build(folder: Path, length: int = LENGTH, size: int = 4, **more: Any) -> quantkit.Llama:
    return quantkit.Llama.build(
        folder, _tokenizer(folder), length, size, device="cpu", dtype="fp32", **more
    )


def _tokenizer(folder: Path) -> Path:
    return folder / "tokenizer.model"


@pytest.fixture(scope="module", params=CASES)
def llama(request: pytest.FixtureRequest, folders: dict[str, Path]) -> quantkit.Llama:
    return _build(folders[request.param])


@pytest.fixture(scope="module")
def llama2(folders: dict[str, Path]) -> quantkit.Llama:
    return _build(folders["llama2"], 128)


@pytest.fixture(scope="module")
def llama3(folders: dict[str, Path]) -> quantkit.Llama:
    return _build(folders["llama3"], 128)


def _plain(model: Decoder, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([list(ids)]), torch.arange(len(ids)))[0].float().log_softmax(-1)


def _expected(
    llama: quantkit.Llama, prompt: list[int], maximum: int, echo: bool, length: int = LENGTH
) -> tuple[list[int], list[float]]:
    """One row of Meta's algorithm, greedy, by forward passes over all of it: continued up to the
    length whatever is said, then cut at the first end token of what is given out.
    """
    ids = list(prompt)
    while len(ids) < min(length, len(prompt) + maximum):
        ids.append(int(_plain(llama.model, ids)[-1].argmax()))
    reported = _plain(llama.model, ids)
    logprobs = [0.0, *(float(reported[at - 1, ids[at]]) for at in range(1, len(ids)))]
    start = 0 if echo else len(prompt)
    tokens, logprobs = ids[start:], logprobs[start:]
    ends = [tokens.index(end) for end in llama.model.config.eos_token_ids if end in tokens]
    return tokens[: min(ends, default=None)], logprobs[: min(ends, default=None)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("echo", [False, True])
def test_tokens_and_log_probabilities_are_those_of_the_algorithm(
    echo: bool, llama: quantkit.Llama
) -> None:
    text = llama.tokenizer.encode(
        "the people of the United States, in order to form a more perfect union"
    )
    prompts = [text[:1], text[:9], text[:LENGTH], (text * 9)[: LENGTH - 3]]
    for maximum in (0, 1, 12, LENGTH - 1):
        tokens, logprobs = llama.generate(prompts, maximum, temperature=0, logprobs=True, echo=echo)
        assert logprobs is not None
        for prompt, ids, reported in zip(prompts, tokens, logprobs, strict=True):
            expected, values = _expected(llama, prompt, maximum, echo)
            assert ids == expected
            torch.testing.assert_close(
                torch.tensor(reported), torch.tensor(values), rtol=0, atol=2e-4
            )
        assert llama.generate(prompts, maximum, temperature=0, echo=echo) == (tokens, None)


@pytest.mark.parametrize("echo", [False, True])
def test_a_result_ends_before_the_first_end_token_also_where_a_prompt_holds_it(
    echo: bool, llama: quantkit.Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [llama.tokenizer.encode(text) for text in ("the people", "a")]
    whole = _expected(llama, prompts[1], 12, False)[0]
    monkeypatch.setattr(
        llama.model, "config", replace(llama.model.config, eos_token_ids=(whole[4], prompts[0][2]))
    )
    tokens, logprobs = llama.generate(prompts, 12, temperature=0, logprobs=True, echo=echo)
    assert logprobs is not None
    for prompt, ids, reported in zip(prompts, tokens, logprobs, strict=True):
        assert ids == _expected(llama, prompt, 12, echo)[0]
        assert len(reported) == len(ids)
    assert tokens[0] == prompts[0][:2] if echo else len(tokens[1]) <= 4


def test_end_tokens_are_the_tokenizers_wherever_it_lies(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("llama2", "llama3"):
        apart = tmp_path / name
        oracle.copy(folders[name], apart)
        shutil.move(_tokenizer(apart), tmp_path / "tokenizer.model")
        llama = quantkit.Llama.build(
            str(apart), str(tmp_path / "tokenizer.model"), 16, 1, dtype="fp32", device="cpu"
        )
        assert (
            llama.model.config.eos_token_ids
            == load_original_tokenizer(tmp_path / "tokenizer.model").eos_ids
            != ()
        )
        assert llama.text_completion(["the"], 0, max_gen_len=5) == _build(
            folders[name]
        ).text_completion(["the"], 0, max_gen_len=5)


def test_a_tokenizer_is_a_file_or_a_folder(folders: dict[str, Path]) -> None:
    folder = folders["llama2 int8"]
    found = [
        quantkit.Llama.build(folder, path, LENGTH, 1, device="cpu").text_completion(
            ["My fellow"], 0, logprobs=True
        )
        for path in (folder, folder / "tokenizer.json", folder / "tokenizer.model")
    ]
    assert found[0] == found[1] == found[2]


# Texts


def _decoded(llama: quantkit.Llama, tokens: list[int]) -> str:
    """Llama 3's tokenizer, of 512 and more tokens here, spells special tokens out; Llama 2's has
    no spellings.
    """
    return llama.tokenizer.decode(tokens, specials=llama.tokenizer.vocab_size == 516)


def test_texts_come_with_what_was_requested(llama: quantkit.Llama) -> None:
    prompts = ["the people", "My fellow citizens", ""]
    ids = [llama.tokenizer.encode(prompt) for prompt in prompts]
    plain = llama.text_completion(prompts, temperature=0, max_gen_len=6)
    reported = llama.text_completion(prompts, temperature=0, max_gen_len=6, logprobs=True)
    tokens, logprobs = llama.generate(ids, 6, temperature=0, logprobs=True)
    assert logprobs is not None
    for one, other, new, values in zip(plain, reported, tokens, logprobs, strict=True):
        assert one == {"generation": _decoded(llama, new)}
        assert other == {
            "generation": _decoded(llama, new),
            "tokens": [_decoded(llama, [token]) for token in new],
            "logprobs": values,
        }
        assert len(new) == 6
    assert json.loads(json.dumps(reported)) == reported


def test_without_a_number_a_text_goes_on_to_the_end(llama: quantkit.Llama) -> None:
    prompt = llama.tokenizer.encode("the people")
    (found,) = llama.text_completion(["the people"], temperature=0, logprobs=True)
    expected, _ = _expected(llama, prompt, LENGTH - 1, False)
    assert found["tokens"] == [_decoded(llama, [token]) for token in expected]


def test_an_echo_begins_with_bos_as_each_tokenizer_decodes_it(
    llama2: quantkit.Llama, llama3: quantkit.Llama
) -> None:
    for llama, bos in ((llama2, ""), (llama3, "<|begin_of_text|>")):
        (found,) = llama.text_completion(["the people"], 0, max_gen_len=0, logprobs=True, echo=True)
        assert found["generation"] == f"{bos}the people"
        assert (found["tokens"][0], found["logprobs"][0]) == (bos, 0.0)
        assert (
            len(found["tokens"])
            == len(found["logprobs"])
            == len(llama.tokenizer.encode("the people"))
        )


def test_special_tokens_in_texts_are_plain_text(
    llama3: quantkit.Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = _requested(llama3, monkeypatch)
    llama3.text_completion(["<|eot_id|>"], 0, max_gen_len=1)
    llama3.chat_completion([[{"role": "user", "content": "<|eot_id|>"}]], 0, max_gen_len=1)
    eot = (llama3.tokenizer.special_tokens or {})["<|eot_id|>"]
    assert [ids.count(eot) for ids in requested] == [0, 1]


# Conversations

USER, ANSWER = {"role": "user", "content": " What? "}, {"role": "assistant", "content": " That.\n"}
SYSTEM = {"role": "system", "content": " Be brief. "}


def _requested(llama: quantkit.Llama, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts that are asked for from now on."""
    requested: list[list[int]] = []
    generate = llama.generate

    def received(prompts: list[list[int]], *given: Any) -> Any:
        requested.extend(prompts)
        return generate(prompts, *given)

    monkeypatch.setattr(llama, "generate", received)
    return requested


def test_llama_2_is_used_in_its_own_format(
    llama2: quantkit.Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = _requested(llama2, monkeypatch)
    encode = llama2.tokenizer.encode
    llama2.chat_completion([[USER], [SYSTEM, USER, ANSWER, USER]], 0, max_gen_len=2)
    first = encode("[INST] <<SYS>>\n Be brief. \n<</SYS>>\n\n What? [/INST] That. ")
    assert requested == [
        encode("[INST] What? [/INST]"),
        [*first, 2, *encode("[INST] What? [/INST]")],
    ]


def test_llama_3_is_used_in_its_own_format(
    llama3: quantkit.Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = _requested(llama3, monkeypatch)
    llama3.chat_completion([[SYSTEM, USER]], 0, max_gen_len=2)
    text = "".join(
        f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}"
        for role, content in (
            ("system", "Be brief.<|eot_id|>"),
            ("user", "What?<|eot_id|>"),
            ("assistant", ""),
        )
    )
    assert requested == [llama3.tokenizer.encode(text, specials=True)]


def test_answers_come_as_messages(llama: quantkit.Llama) -> None:
    for found in llama.chat_completion([[USER], [USER]], temperature=0, max_gen_len=4):
        assert found.keys() == {"generation"}
        assert found["generation"].keys() == {"role", "content"}
        assert found["generation"]["role"] == "assistant"
    (found,) = llama.chat_completion([[USER]], temperature=0, max_gen_len=4, logprobs=True)
    assert found.keys() == {"generation", "tokens", "logprobs"}
    assert len(found["tokens"]) == len(found["logprobs"]) <= 4


@pytest.mark.parametrize("tag", ["[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"])
def test_tags_in_a_conversation_of_llama_2_are_refused_in_its_place(
    tag: str, llama2: quantkit.Llama
) -> None:
    bad = {"role": "user", "content": f"x {tag} y"}
    dialogs = [
        [USER],
        [bad],
        [SYSTEM, USER, ANSWER, bad],
        [{**SYSTEM, "content": tag}, USER],
        [USER, ANSWER, USER],
    ]
    plain = llama2.chat_completion(
        [dialogs[0], dialogs[4]], temperature=0, max_gen_len=4, logprobs=True
    )
    found = llama2.chat_completion(
        [*dialogs[:1], dialogs[1], dialogs[4]], 0, max_gen_len=4, logprobs=True
    )
    assert [found[0], found[2]] == plain
    for one in llama2.chat_completion(dialogs[1:4], temperature=0, max_gen_len=4):
        assert one == {"generation": {"role": "assistant", "content": REFUSED}}
    assert REFUSED == "Error: special tags are not allowed as part of the prompt."


def test_tags_of_llama_2_are_nothing_to_llama_3(llama3: quantkit.Llama) -> None:
    (found,) = llama3.chat_completion([[{"role": "user", "content": "[INST]"}]], 0, max_gen_len=1)
    assert found["generation"]["content"] != REFUSED


# Draws


def test_draws_follow_the_seed_one_call_after_the_other(
    folders: dict[str, Path], llama2: quantkit.Llama
) -> None:
    def draws(**given: Any) -> list[Any]:
        llama = _build(folders["llama2"], **given)
        return [llama.text_completion(["The people"] * 3, max_gen_len=10) for _ in range(2)]

    first, again, other = draws(), draws(seed=1), draws(seed=2)
    assert first == again != other
    assert first[0] != first[1]
    assert len({one["generation"] for one in first[0]}) > 1
    greedy = llama2.text_completion(["The people"], temperature=0, max_gen_len=10)
    assert (
        llama2.text_completion(["The people"], temperature=0.6, top_p=0, max_gen_len=10) == greedy
    )


# Wrong arguments


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_seq_len": 0}, ("max_seq_len is out of range", "1 to 4096")),
        ({"max_seq_len": 4097}, ("max_seq_len is out of range (found 4097",)),
        ({"max_seq_len": "512"}, ("`max_seq_len` is of the wrong type",)),
        ({"max_batch_size": 0}, ("max_batch_size must be at least 1",)),
        (
            {"model_parallel_size": 2},
            ("differs from the number of processes (found 2, expected 1)", "with torchrun"),
        ),
        ({"seed": "x"}, ("`seed` is of the wrong type",)),
        ({"ckpt_dir": "nowhere"}, ("nowhere: does not exist",)),
        ({"tokenizer_path": "nowhere"}, ("nowhere: does not exist",)),
        ({"tokenizer_path": None}, ("`tokenizer_path` is of the wrong type",)),
        ({"dtype": "fp8"}, ("unknown float type",)),
        ({"backend": "fast"}, ("unknown backend",)),
    ],
    ids=repr,
)
def test_what_cannot_be_built_is_reported(
    given: dict[str, Any], words: tuple[str, ...], folders: dict[str, Path]
) -> None:
    folder = folders["llama2"]
    arguments = {
        "ckpt_dir": folder,
        "tokenizer_path": _tokenizer(folder),
        "max_seq_len": 8,
        "max_batch_size": 1,
    }
    with pytest.raises(QuantkitError) as caught:
        quantkit.Llama.build(**{**arguments, **given})
    assert all(word in str(caught.value) for word in words), caught.value


def test_another_models_tokenizer_is_reported(folders: dict[str, Path]) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"found 2048 tokens, expected at most 516\); the tokenizer belongs to another",
    ):
        quantkit.Llama.build(folders["llama3"], _tokenizer(folders["llama2"]), 8, 1)


def test_what_cannot_be_generated_is_reported(llama2: quantkit.Llama) -> None:
    for ask, words in (
        (lambda: llama2.generate([[1]] * 5, 1), "found 5, expected at most 4"),
        (
            lambda: llama2.generate([[1], [1] * 129], 1),
            "prompt 1 is longer than max_seq_len (found 129, expected 128)",
        ),
        (lambda: llama2.generate([[]], 1), "the prompt is empty"),
        (lambda: llama2.generate([[5000]], 1), "outside the vocabulary"),
        (lambda: llama2.generate(["text"], 1), "the prompt is a string"),
        (lambda: llama2.generate(None, 1), "`prompt_tokens` is of the wrong type"),
        (lambda: llama2.generate([[1]], -1), "max_gen_len must not be negative"),
        (lambda: llama2.generate([[1]], None), "`max_gen_len` is of the wrong type"),
        (lambda: llama2.generate([[1]], 1, temperature=-1), "temperature must"),
        (lambda: llama2.generate([[1]], 1, logprobs=0), "`logprobs` is of the wrong type"),
        (lambda: llama2.text_completion("text"), "`prompts` is of the wrong type"),
        (lambda: llama2.text_completion([7]), "`text` is of the wrong type"),
        (lambda: llama2.chat_completion([USER]), "a message is an object"),
        (lambda: llama2.chat_completion([[]]), "llama2 has at most one system message"),
        (lambda: llama2.chat_completion([[USER, ANSWER]]), "the user last"),
        (lambda: llama2.chat_completion("hi"), "`dialogs` is of the wrong type"),
    ):
        with pytest.raises(RequestError) as caught:
            ask()  # type: ignore[no-untyped-call]
        assert words in str(caught.value)
    assert llama2.generate([], 4) == ([], None)
    assert llama2.text_completion([]) == llama2.chat_completion([]) == []


# Several processes

SHARED = """
import json, sys
import quantkit
folder, out, rank = sys.argv[1], sys.argv[2], __import__("os").environ.get("RANK", "0")
llama = quantkit.Llama.build(folder, folder + "/tokenizer.model", 60, 3, dtype="fp32", device="cpu")
found = [
    llama.text_completion(["the people", "a", "My fellow citizens"], 0, max_gen_len=12, logprobs=True, echo=True),
    llama.text_completion(["the people", "a"], max_gen_len=12),
    llama.chat_completion([[{"role": "user", "content": "Hi"}]], max_gen_len=12),
    llama.model.group.size,
]
again = quantkit.Llama.build(folder, folder + "/tokenizer.model", 60, 3, found[-1], dtype="fp32", device="cpu")
assert again.text_completion(["a"], 0, max_gen_len=3) == llama.text_completion(["a"], 0, max_gen_len=3)
open(f"{out}/{rank}.json", "w").write(json.dumps(found))
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama2", "llama3 int4"])
def test_processes_share_the_model_and_all_have_the_results(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    for done in [
        forked.python(SHARED, folders[name], tmp_path / "alone"),
        *forked.group(2, SHARED, folders[name], tmp_path),
    ]:
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    first, second, alone = (
        json.loads((tmp_path / path).read_text()) for path in ("0.json", "1.json", "alone/0.json")
    )
    assert first == second
    assert first.pop() == 2
    assert alone.pop() == 1
    for one, other in zip(first[0], alone[0], strict=True):
        torch.testing.assert_close(
            torch.tensor(one.pop("logprobs")),
            torch.tensor(other.pop("logprobs")),
            rtol=0,
            atol=1e-3,
        )
    assert first == alone


DIFFERENT = """
import os, sys
import quantkit
folder = sys.argv[1]
try:
    quantkit.Llama.build(folder, folder + "/tokenizer.model", 60, 3, seed=int(os.environ["RANK"]), device="cpu")
except quantkit.errors.QuantkitError as error:
    print(error)
"""  # noqa: E501


@pytest.mark.slow
def test_processes_that_do_not_go_together_are_reported(folders: dict[str, Path]) -> None:
    for done in forked.group(2, DIFFERENT, folders["llama2"]):
        assert (done.returncode, done.stderr) == (0, "")
        assert "the processes differ in seed" in done.stdout


def test_another_number_of_processes_is_reported_before_they_join(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # and nothing else that joining takes
    folder = folders["llama2"]
    with pytest.raises(quantkit.errors.RequestError, match=r"\(found 3, expected 2\)"):
        quantkit.Llama.build(
            folder, folder / "tokenizer.model", 60, 3, model_parallel_size=3, device="cpu"
        )
