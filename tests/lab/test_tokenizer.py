"""The small conductor's tokenizer: the very prompt of the trainer comes out of the text that a server is sent.

The file of the trained checkpoint is read here as Hugging Face's library reads it, by the few of its rules that it
uses; `test_export.py` asks the library, and `make test-vllm` a real server.
"""

import json
from pathlib import Path
from random import Random

import pytest

from app.lab import prompt
from app.lab.lessons import Split, draw_lesson
from app.lab.plan_grammar import ROLES
from app.lab.plans import TOKENS, to_text, to_tokens
from tests.lab.test_world import any_plan

FILE = json.loads((Path(__file__).parents[1] / "vllm" / "trained" / "tokenizer.json").read_text())
IDS: dict[str, int] = FILE["model"]["vocab"]
BLANK = "\u0120"
"""A blank in the alphabet of byte-level tokenizers."""
SPLITS: tuple[Split, ...] = ("train", "held-out tasks", "unseen paraphrases", "random pools", "unseen families")


def encode(text: str) -> list[int]:
    """Split at blanks; each piece is a token or the unknown one."""
    assert (FILE["model"]["type"], FILE["pre_tokenizer"], FILE["normalizer"]) == (
        "WordLevel",
        {"type": "WhitespaceSplit"},
        None,
    )
    unknown = IDS[FILE["model"]["unk_token"]]
    return [IDS.get(piece, unknown) for piece in text.split()]


def decode(ids: list[int]) -> str:
    """Tokens joined, from the alphabet of byte-level tokenizers."""
    back = {number: text for text, number in IDS.items()}
    return "".join(back[number] for number in ids).replace(BLANK, " ")


@pytest.mark.parametrize("split", SPLITS)
def test_a_server_reads_what_the_trainer_reads(split: Split) -> None:
    random = Random(split)
    for _ in range(60):
        lesson = draw_lesson(random, split)
        assert encode(prompt.as_text(lesson.problem.text, lesson.pool, lesson.order)) == lesson.prompt()


def test_words_that_were_never_learned_are_unknown_and_no_text_becomes_a_plan() -> None:
    lesson = draw_lesson(Random(1), "train")
    text = f'Zyzzyva {to_text([0, 3, 9])} <pool> {{"worker":0, 7'
    tokens = lesson.prompt()[lesson.prompt().index(IDS["<pool>"]) :]
    ids = encode(prompt.as_text(text, lesson.pool, lesson.order))
    assert ids == [*prompt.tokens(text, (), ())[:-1], *tokens]
    assert ids[0] == IDS[prompt.UNKNOWN]
    assert all(number >= TOKENS for number in ids[: -len(tokens)])
    assert ids.count(IDS["<pool>"]) == 1


def test_training_disturbs_known_words_alone() -> None:
    """Digits and signs stay, words that are unknown anyway stay, and so do the cards."""
    random = Random(4)
    words = {number for text, number in IDS.items() if text.isalpha()}
    changed: set[int] = set()
    for _ in range(200):
        lesson = draw_lesson(random, "train")
        tokens, disturbed = lesson.prompt(), lesson.prompt(random, 1.0)
        assert [n for n in disturbed if n not in words | {IDS[prompt.UNKNOWN]}] == [
            n for n in tokens if n not in words | {IDS[prompt.UNKNOWN]}
        ]
        assert disturbed.count(IDS[prompt.UNKNOWN]) >= tokens.count(IDS[prompt.UNKNOWN])
        changed |= {len(disturbed) - len(tokens)}
        assert lesson.prompt(random, 0.0) == tokens
    assert min(changed) < 0 < max(changed)


def test_every_plan_comes_back_as_its_text() -> None:
    random = Random(2)
    for _ in range(100):
        tokens = to_tokens(any_plan(random))
        assert decode(tokens) == to_text(tokens)


def test_each_text_is_one_token_and_plain_in_the_byte_alphabet() -> None:
    assert len(IDS) == len(ROLES.tokens) + len(prompt.words()) == prompt.size()
    assert sorted(IDS.values()) == list(range(prompt.size()))
    assert all("!" <= char <= "~" or char == BLANK for text in IDS for char in text)
