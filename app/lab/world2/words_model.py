"""The conductor of words: a Llama of `transformers` from scratch over a byte-level BPE, taught by imitation.

The tokenizer is learned from the words of training texts, cards and plans; whatever it has no word for it spells in
bytes, so that every prompt can be read and every plan can be written. It is used through a chat template, like that of
any chat model. Cards stand first, so that the tasks of a lesson share one reading of them, as they do in a server's
prefix cache.

While it is taught, two linear readers stand beside it that are not kept: one has to tell from the end of each card what
the card says, the other from the end of a question which families, document and confidence it has. Without them a small
model learns to read numbers from plans alone, which takes many times as long.

`Tensor` is torch's: the type checker runs where torch is not installed, so this is where types end.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import astuple
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from app.lab.world2.constants import DOCUMENT_TOKENS
from app.lab.world2.tasks import MOST_PARTS
from app.lab.world2.words_lessons import Lesson, plan_text, prompt

Tensor = Any
CONTEXT = 2_048
VOCABULARY = 2_048
THETA = 1_000.0
PAD, SYSTEM, USER, PLAN, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPLIT = (
    r'(?<="subtask":")[^"\\]+|[{}\[\]",:]+(?:(?:steps|worker|subtask|access|user)[{}\[\]",:]+)+'
    r"| ?\p{L}+| ?\$?\p{N}+(?:\.\p{N}+)?%?| ?[^\s\p{L}\p{N}]+|\s"
)
"""The places where texts are cut before pairs are merged: a plan's keys with the signs around them, subtasks, words,
numbers. So a subtask that is frequent in training becomes one token or few, and any other one is spelled."""
HEADS_LOOKING_BACK = ((1.5, 4.6, 1.0), (18.0, 2.0, 16.0))
"""For the first two layers: the mean distance at which one head begins by looking back, its strength, and the longest
wave by which it does so in parts of the shortest."""
FACTS = 9
"""Numbers that the reader of cards tells: `Lesson.facts`."""
PLANS_AT_A_TIME = 64
"""Plans that are written at a time."""
MOST_TOKENS = 160
"""The most tokens of a plan."""
CHOICES_OF_PLAN = 10
"""About so many tokens of a plan are choices."""
MAX_NOISE = 0.4
"""The greatest share of a question's tokens that training exchanges for any others."""


class Sizes(Struct, frozen=True):
    """The size of the model, and of its training."""

    hidden: int = 128
    layers: int = 3
    heads: int = 2
    pools: int = 8
    """Lessons of a step."""
    rate: float = 2e-3
    """The learning rate after the first steps."""
    rising: int = 50
    """Steps until then."""
    reading: float = 1.0
    """The weight of the two readers' losses, at the beginning; at the end it is a tenth."""


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE from these texts."""
    backend = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=5,
        special_tokens=[PAD, SYSTEM, USER, PLAN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


class Batch(Struct, frozen=True):
    """Lessons as tokens. Cards are padded at their beginnings, questions with their plans at their ends."""

    cards: Tensor
    """[lessons, longest]"""
    card_facts: Tensor
    """[workers of all lessons, FACTS], in the order of the last tokens of cards, which are their numbers."""
    tasks: Tensor
    """[lessons x tasks, longest]: question, plan, end."""
    plans: Tensor
    """[lessons x tasks, longest]: true for the tokens that are the plan's."""
    question_ends: Tensor
    """[lessons x tasks]: the place of the end of the question."""
    question_facts: Tensor
    """[lessons x tasks, what the reader of questions tells]."""

    def to(self, device: Any) -> "Batch":
        """Return the same batch on a device."""
        return Batch(*[column.to(device) for column in astuple(self)])


class WordsConductor:
    """A model with its tokenizer, and what stands beside them while they are taught."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, families: int = 0) -> None:
        self.model, self.tokenizer = model, tokenizer
        hidden, question_outputs = model.config.hidden_size, MOST_PARTS * families + len(DOCUMENT_TOKENS) + 1
        self._families = families
        self.readers = torch.nn.ModuleList([torch.nn.Linear(hidden, FACTS), torch.nn.Linear(hidden, question_outputs)])
        self._pad, self._end = tokenizer.pad_token_id, tokenizer.eos_token_id
        (self._line,) = tokenizer("\n", add_special_tokens=False)["input_ids"]

    @classmethod
    def with_random_weights(
        cls, sizes: Sizes, tokenizer: PreTrainedTokenizerFast, families: int, seed: int
    ) -> "WordsConductor":
        """Return a model with random weights that depend on the seed alone."""
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=sizes.hidden,
                intermediate_size=2 * sizes.hidden,
                num_hidden_layers=sizes.layers,
                num_attention_heads=sizes.heads,
                max_position_embeddings=CONTEXT,
                rope_parameters={"rope_type": "default", "rope_theta": THETA},
                initializer_range=sizes.hidden**-0.5 / 2,
                attention_bias=True,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
        _initialise(model)
        words = cls(model, tokenizer, families)
        words.model.to(_device())
        words.readers.to(_device())
        return words

    @classmethod
    def from_folder(cls, folder: Path) -> "WordsConductor":
        """Return the model of an exported folder, in full precision."""
        disable_progress_bar()
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(_device())
        return cls(model, PreTrainedTokenizerFast.from_pretrained(folder))

    @property
    def parameters(self) -> int:
        """Return the number of weights."""
        return sum(weights.numel() for weights in self.model.parameters())

    # Teaching.

    def batch(self, lessons: Sequence[Lesson], random: Random) -> Batch:
        """Return lessons as tokens: each pool in an order of its own, each task with a plan that is drawn."""
        cards, card_facts, tasks, question_ends, plans, question_facts = [], [], [], [], [], []
        for lesson in lessons:
            order = random.sample(range(len(lesson.pool)), len(lesson.pool))
            cards.append(self._tokens(f"{SYSTEM}{prompt(lesson.pool, order)}{END}"))
            card_facts += [lesson.facts[place] for place in order]
            for task in lesson.tasks:
                question = self._add_noise(self._tokens(task.text), random)
                question = [self.tokenizer.convert_tokens_to_ids(USER), *question, self._end]
                (plan,) = random.choices(task.plans, task.chances)
                answer = self._tokens(f"{PLAN}{plan_text(plan, order)}{END}")
                tasks.append(question + answer)
                question_ends.append(len(question) - 1)
                plans.append([False] * (len(question) + 1) + [True] * (len(answer) - 1))
                question_facts.append(self._question_facts(task.families, task.document, task.confidential))
        return Batch(
            torch.tensor(_pad_rows(cards, self._pad, left=True)),
            torch.tensor(card_facts),
            torch.tensor(_pad_rows(tasks, self._pad)),
            torch.tensor(_pad_rows(plans, 0)).bool(),
            torch.tensor(question_ends),
            torch.tensor(question_facts),
        )

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean negative log-likelihood of a plan, and the loss of the two readers."""
        pools, tasks = batch.cards.shape[0], batch.tasks.shape[0]
        card_mask = batch.cards != self._pad
        positions = (card_mask.cumsum(1) - 1).clamp(min=0)
        card_output = self.model.model(
            input_ids=batch.cards, attention_mask=card_mask.long(), position_ids=positions, use_cache=True
        )
        cache = card_output.past_key_values
        cache.batch_repeat_interleave(tasks // pools)
        attention_mask = torch.cat([card_mask.repeat_interleave(tasks // pools, 0), batch.tasks != self._pad], 1)
        card_lengths = card_mask.sum(1).repeat_interleave(tasks // pools)
        positions = card_lengths[:, None] + torch.arange(batch.tasks.shape[1], device=card_lengths.device)[None]
        states = self.model.model(
            input_ids=batch.tasks,
            attention_mask=attention_mask.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        logits = self.model.lm_head(states[:, :-1][batch.plans[:, 1:]])
        plan_loss = torch.nn.functional.cross_entropy(logits, batch.tasks[:, 1:][batch.plans[:, 1:]], reduction="sum")
        ends = (batch.cards == self._line) | (batch.cards == self._end)
        card_estimates = self.readers[0](card_output.last_hidden_state[:, :-1][ends[:, 1:]])
        question_logits = self.readers[1](states[torch.arange(tasks, device=card_lengths.device), batch.question_ends])
        card_loss = torch.nn.functional.mse_loss(card_estimates, batch.card_facts)
        question_loss = torch.nn.functional.binary_cross_entropy_with_logits(question_logits, batch.question_facts)
        return plan_loss / tasks, card_loss + 4 * question_loss

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def _add_noise(self, tokens: list[int], random: Random) -> list[int]:
        """Exchange some tokens for any others, as an unknown phrasing might."""
        share = random.random() * MAX_NOISE if random.random() < 0.5 else 0.0
        least, most = self._end + 1, len(self.tokenizer)
        return [random.randrange(least, most) if random.random() < share else token for token in tokens]

    def _question_facts(self, families: Sequence[int], document: int, confidential: bool) -> list[float]:
        """Return the families, document and confidence of a question as zeros and ones."""
        facts = [0.0] * (MOST_PARTS * self._families + len(DOCUMENT_TOKENS) + 1)
        for part, family in enumerate(families):
            facts[part * self._families + family] = 1.0
        facts[MOST_PARTS * self._families + document] = 1.0
        facts[-1] = float(confidential)
        return facts

    # Planning.

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def likeliest_plans(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """Return the likeliest plan for each pair of cards and question, token by token, without a grammar."""
        texts: list[str] = []
        for start in range(0, len(pairs), PLANS_AT_A_TIME):
            batch = pairs[start : start + PLANS_AT_A_TIME]
            prompts = [self._tokens(f"{SYSTEM}{cards}{END}{USER}{question}{END}{PLAN}") for cards, question in batch]
            ids = torch.tensor(_pad_rows(prompts, self._pad, left=True), device=self.model.device)
            generated = self.model.eval().generate(
                input_ids=ids,
                attention_mask=(ids != self._pad).long(),
                do_sample=False,
                max_new_tokens=MOST_TOKENS,
                pad_token_id=self._pad,
                use_cache=True,
            )
            texts += self.tokenizer.batch_decode(generated[:, ids.shape[1] :], skip_special_tokens=True)
        return texts

    def save(self, folder: Path) -> None:
        """Write model and tokenizer as Hugging Face's libraries and vLLM read them."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


class Batches(Dataset[Batch]):  # type: ignore[misc]
    """The batch of each step, which depends on the seed and the step alone. Lessons are met again and again."""

    def __init__(self, words: WordsConductor, lessons: Sequence[Lesson], sizes: Sizes, steps: int, seed: int) -> None:
        self._words, self._lessons, self._sizes, self._steps, self._seed = words, lessons, sizes, steps, seed

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> Batch:
        random = Random(f"words|{self._seed}|{step}")
        return self._words.batch(random.sample(self._lessons, self._sizes.pools), random)


def load_batches(batches: Batches, processes: int) -> Iterable[Batch]:
    """Return the batches in order. With several processes all but one of them write texts as tokens, ahead of the
    training."""
    if processes == 1:
        return (batches[step] for step in range(len(batches)))
    return DataLoader(batches, batch_size=None, num_workers=processes - 1, multiprocessing_context="fork")  # type: ignore[no-any-return]


class TrainingRun:
    """One training, which ends after so many steps, or after so many seconds if these end sooner."""

    def __init__(self, sizes: Sizes, steps: int, seconds: float = float("inf")) -> None:
        self._sizes, self._steps, self._seconds = sizes, steps, seconds
        self._step, self._began, self._looked = 0, time.monotonic(), 0

    @property
    def progress(self) -> float:
        """Return the share that is done, from 0 to 1."""
        return min(1.0, max(self._step / self._steps, (time.monotonic() - self._began) / self._seconds))

    def is_exam_due(self, count: int) -> bool:
        """Return True once in each of so many parts, and in the end."""
        is_due = int(self.progress * count) > self._looked
        if is_due:
            self._looked = int(self.progress * count)
        return is_due

    def train(self, words: WordsConductor, batches: Iterable[Batch]) -> Iterator[tuple[float, float]]:
        """Teach to the end, and yield the losses of each step.

        The weights are float32 and what is computed with them bfloat16, so that small changes are not rounded off."""
        sizes, device = self._sizes, words.model.device
        parameters = [*words.model.parameters(), *words.readers.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=sizes.rate, betas=(0.9, 0.98), weight_decay=0.01)
        for batch in batches:
            words.model.train()
            progress = self.progress
            for group in optimizer.param_groups:
                group["lr"] = sizes.rate * min((self._step + 1) / sizes.rising, 1.0) * (1 - 0.95 * progress)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                plan_loss, reader_loss = words.loss(batch.to(device))
            optimizer.zero_grad()
            (plan_loss / CHOICES_OF_PLAN + sizes.reading * (1 - 0.9 * progress) * reader_loss).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            self._step += 1
            yield float(plan_loss.detach()), float(reader_loss.detach())
            if self.progress == 1.0:
                return


def _device() -> Any:
    """Return the GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _initialise(model: LlamaForCausalLM) -> None:
    """Two changes of the library's random weights, both of which training may undo: what a layer adds to the stream is
    scaled down by the depth, and one head of each of the first two layers looks back, from a number to the domain
    before it and from the end of a card over all of it. To find that out takes thousands of steps otherwise."""
    half = model.config.hidden_size // model.config.num_attention_heads // 2
    turns = THETA ** (-torch.arange(half).float() / half)
    deep = (2 * len(model.model.layers)) ** -0.5
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(deep)
            layer.mlp.down_proj.weight.mul_(deep)
        for layer, (back, strength, longest) in zip(model.model.layers, HEADS_LOOKING_BACK, strict=False):
            used = (turns <= turns[0] / longest * 2) & (turns >= turns[0] / longest / 4)
            attention = layer.self_attn
            attention.q_proj.bias[:half] = strength * used
            attention.k_proj.bias[:half] = strength * used * (back * turns).cos()
            attention.k_proj.bias[half : 2 * half] = strength * used * (back * turns).sin()


def _pad_rows(rows: Sequence[Sequence[Any]], fill: int, *, left: bool = False) -> list[list[Any]]:
    """Return rows that are filled up to one length."""
    longest = max(map(len, rows))
    if left:
        return [[fill] * (longest - len(row)) + list(row) for row in rows]
    return [list(row) + [fill] * (longest - len(row)) for row in rows]
