"""The tokenizer of the small conductor, as the libraries of Hugging Face and vLLM read it.

One token is one word between blanks, as `conductor/compact.py` writes them; a word that is not in the vocabulary is the
unknown one. Plan tokens are whole pieces of JSON. They join without blanks, so a decoder that is held to the plan's
schema can choose among exactly those tokens that `plans.legal` names, and after the end nothing but the padding token,
which ends the text. Tokens are stored in the alphabet of byte-level tokenizers, from which grammars learn their bytes.
"""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from app.lab import prompt
from app.lab.plan_grammar import ROLES, WORDS, Form

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The prompt is one message, and the plan follows it at once."""
BLANK = "\u0120"
"""A blank in the alphabet of byte-level tokenizers; all other characters here stand for themselves."""
CARD = r"<(?!\$|pool>)|(?<=[a-z])-(?=[a-z])|(?<=[a-z])(?<!<pool)>"
"""The marks that are removed where cards are read by the word: `<general-large>` is then two words."""


def tokenizer(form: Form = ROLES, context: int = 256) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a form; `context` is the model's, in tokens."""
    texts = (*form.tokens, *prompt.words(form))
    vocabulary = {text.replace(" ", BLANK): number for number, text in enumerate(texts)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=prompt.UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if form is WORDS:
        by_word = pre_tokenizers.Split(Regex(CARD), behavior="removed")
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), by_word])
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=context,
        eos_token=prompt.PAD,
        pad_token=prompt.PAD,
        unk_token=prompt.UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
