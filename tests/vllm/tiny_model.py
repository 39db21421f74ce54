"""Build a tiny random Qwen2 model that vLLM can serve, from nothing but this folder.

Tests of the conductor need a real vLLM, not a clever model: what they prove is the
wire format, structured decoding and streaming. Random weights are the hardest case
for a schema, because whatever the grammar permits will sooner or later be sampled.
Run with the vLLM environment's interpreter: ``python tiny_model.py DIRECTORY``.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CORPUS = Path(__file__).with_name("corpus.txt")
VOCABULARY = 1024
CONTEXT = 8192
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

# Qwen2's own split: each digit is a token of its own, as with the real models, so that
# the probability of a worker's ordinal can be read from one token.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: every byte is a token, so no text and no JSON is out of reach.

    The merges learned from the corpus only make prompts shorter (about 3 characters
    per token instead of 1), so that a full conductor prompt fits the context.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS.read_text().splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHATML,
        model_max_length=CONTEXT,
    )


def random_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """About 110,000 seeded parameters in the architecture of a model people serve."""
    torch.manual_seed(20261120)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    return Qwen2ForCausalLM(config).to(torch.bfloat16)


def build(directory: Path) -> None:
    """Write model, tokenizer and chat template in Hugging Face format."""
    tokenizer = train_tokenizer()
    model = random_model(tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    parameters = sum(weights.numel() for weights in model.parameters())
    text = CORPUS.read_text()
    ratio = len(text) / len(tokenizer(text)["input_ids"])
    print(f"{parameters} parameters, {len(tokenizer)} tokens, {ratio:.1f} chars/token")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
