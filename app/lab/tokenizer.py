"""The tokenizer of the small conductor as files that Hugging Face's libraries and vLLM read.

One token is one word between blanks, as `conductor/compact.py` writes them; a word that is not in the vocabulary is the
unknown one. Plan tokens are whole pieces of JSON. They join without blanks, so a decoder that is held to the plan's
schema can choose among exactly those tokens that `plans.legal` names, and after the end nothing but the padding token,
which ends the text. Tokens are stored in the alphabet of byte-level tokenizers, from which grammars learn their bytes.
"""

from typing import Any

from app.lab import prompt
from app.lab.plan_grammar import ROLES, WORDS, Form

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The prompt is one message, and the plan follows it at once."""
BLANK = "\u0120"
"""A blank in the alphabet of byte-level tokenizers; all other characters here stand for themselves."""
CARD = r"<(?!\$|pool>)|(?<=[a-z])-(?=[a-z])|(?<=[a-z])(?<!<pool)>"
BY_BLANK = {"type": "WhitespaceSplit"}
BY_WORD = {
    "type": "Sequence",
    "pretokenizers": [
        BY_BLANK,
        {"type": "Split", "pattern": {"Regex": CARD}, "behavior": "Removed", "invert": False},
    ],
}
"""A card's strengths, `<general-large>`, are words of their own where cards are read by the word."""


def tokens(form: Form = ROLES) -> tuple[str, ...]:
    """Every token's text, by its id."""
    return (*form.tokens, *prompt.words(form))


def tokenizer(form: Form = ROLES) -> dict[str, Any]:
    """`tokenizer.json`."""
    ids = {text.replace(" ", BLANK): number for number, text in enumerate(tokens(form))}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[text], "content": text, **special} for text in (prompt.PAD, prompt.UNKNOWN)],
        "normalizer": None,
        "pre_tokenizer": BY_WORD if form is WORDS else BY_BLANK,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": prompt.UNKNOWN},
    }


def tokenizer_config(context: int) -> dict[str, Any]:
    """`tokenizer_config.json`; `context` is in tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "eos_token": prompt.PAD,
        "pad_token": prompt.PAD,
        "unk_token": prompt.UNKNOWN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
