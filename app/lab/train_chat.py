"""A chat model of Hugging Face's as something to train: loaded, given adapters, and taught to imitate plans.

Imitation is the supervised warm start (every example counts alike) and advantage-weighted regression (each by its
weight): the weighted negative log-likelihood of the plan's tokens, the prompt's being left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from msgspec import Struct
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import cached_file

from app.errors import ConfigInvalid
from app.lab.rollouts import Example, Turns
from app.lab.training_options import Recipe

Say = Callable[[str], None]
PLAIN: Mapping[str, bool] = {"enable_thinking": False}
"""The options of the chat template: a model that can think before it answers writes the plan at once."""


class ChatModel(Struct, frozen=True):
    """A model to train with its tokenizer. `model` is a `PeftModel` if adapters are trained."""

    model: Any
    tokenizer: Any

    def tokens(self, messages: Turns) -> list[int]:
        """Return the prompt as the server's chat template writes it."""
        turns = [dict(turn) for turn in messages]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **PLAIN)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def likeliest(self, messages: Turns, most: int) -> tuple[str, float]:
        """Return the likeliest answer of at most `most` tokens, and the smallest margin among them in nats."""
        prompt = torch.tensor([self.tokens(messages)], device=self.model.device)
        generated = self.model.eval().generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=most,
            output_scores=True,
            return_dict_in_generate=True,
            use_cache=True,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        margins = [-float(logits[0].float().topk(2).values.diff()) for logits in generated.scores]
        text = self.tokenizer.decode(generated.sequences[0, prompt.shape[1] :], skip_special_tokens=True)
        return str(text), min(margins, default=0.0)


def load_model(recipe: Recipe) -> ChatModel:
    """Return the recipe's model, with fresh adapters if it has some. Raises `ConfigInvalid` if it cannot be loaded.

    Weights are float32 on a GPU, too, which computes with them in bfloat16 (`autocast`): the steps of training are
    smaller than what bfloat16 can add to a weight, and adapters that are merged into the base for vLLM, and out of it
    again, would change a base of bfloat16 each time.
    """
    set_seed(recipe.seed)
    try:
        tokenizer = AutoTokenizer.from_pretrained(recipe.model, padding_side="left", truncation_side="left")
        model = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigInvalid([f"--model {recipe.model}: {str(error).splitlines()[0]}"]) from None
    if tokenizer.chat_template is None:
        raise ConfigInvalid([f"--model {recipe.model}: its tokenizer has no chat template; choose a chat model"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if torch.cuda.is_available():
        model = model.to("cuda")
    if not recipe.lora:
        return ChatModel(model, tokenizer)
    adapters = LoraConfig(r=recipe.lora, lora_alpha=2 * recipe.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    return ChatModel(get_peft_model(model, adapters), tokenizer)


def model_folder(model: str) -> Path:
    """Return the folder of a model that was loaded: its own, or that of the library's cache."""
    if Path(model).is_dir():
        return Path(model)
    return Path(str(cached_file(model, "config.json"))).parent


def autocast(device: str) -> Any:
    """Return the context in which a model computes: in bfloat16 on a GPU; without one bfloat16 saves little."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


def save(model: ChatModel, out: Path) -> Path:
    """Save adapters in PEFT's format under `adapter`, or the whole model under `model`, with the tokenizer."""
    folder = out / ("adapter" if isinstance(model.model, PeftModel) else "model")
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


def imitate(
    model: ChatModel, examples: Sequence[Example], held_out: Sequence[Example], recipe: Recipe, say: Say
) -> list[dict[str, Any]]:
    """Teach the examples for the recipe's epochs; the curve. `held_out` is only measured, before and after."""
    if not examples:
        raise ConfigInvalid(["there is nothing to imitate: no rollout of the training side is rated as it must be"])
    trained = [parameter for parameter in model.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.warm_rate, weight_decay=0.0)
    batches = list(_batches(examples, recipe))
    rows = [{"step": 0, "held_out": _mean_loss(model, held_out, recipe)}]
    for number, batch in enumerate(batches, 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.warm_rate * min(number / 10, 1.0) * (1 - 0.9 * (number - 1) / len(batches))
        optimizer.zero_grad()
        loss = 0.0
        for start in range(0, len(batch), recipe.micro):
            part = _loss(model, batch[start : start + recipe.micro]) / len(batch)
            part.backward()
            loss += float(part.detach())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        rows.append({"step": number, "imitation": round(loss, 5)})
        if number % 20 == 0 or number == len(batches):
            say(f"imitation {number} of {len(batches)}: loss {loss:.4f}")
    rows[-1]["held_out"] = _mean_loss(model, held_out, recipe)
    return rows


def _batches(examples: Sequence[Example], recipe: Recipe) -> Iterator[list[Example]]:
    random = Random(recipe.seed)
    for _ in range(recipe.epochs):
        shuffled = random.sample(examples, len(examples))
        for start in range(0, len(shuffled), recipe.batch):
            yield shuffled[start : start + recipe.batch]


def _loss(model: ChatModel, examples: Sequence[Example]) -> Any:
    """Return the sum over the examples of weight times mean negative log-likelihood of a plan's tokens."""
    ids, mask, spoken = _pad_examples(model, examples)
    with autocast(ids.device.type):
        logits = model.model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    targets = ids[:, 1:]
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    plan_mask = spoken[:, 1:]
    weights = torch.tensor([example.weight for example in examples], device=each.device)
    return ((each * plan_mask).sum(1) / plan_mask.sum(1).clamp(min=1) * weights).sum()


def _mean_loss(model: ChatModel, examples: Sequence[Example], recipe: Recipe) -> float | None:
    if not examples:
        return None
    with torch.no_grad():
        parts = [
            float(_loss(model, examples[start : start + recipe.micro]))
            for start in range(0, len(examples), recipe.micro)
        ]
    return round(sum(parts) / sum(example.weight for example in examples), 5)


def _pad_examples(model: ChatModel, examples: Sequence[Example]) -> tuple[Any, Any, Any]:
    """Return tokens, the mask of what is no padding, and the mask of the plan's tokens; padded on the right."""
    pairs = [_tokens(model, example) for example in examples]
    longest = max(len(prompt) + len(plan) for prompt, plan in pairs)
    device = model.model.device
    ids = torch.full((len(pairs), longest), model.tokenizer.pad_token_id, device=device)
    mask, spoken = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, (prompt, plan) in enumerate(pairs):
        whole = len(prompt) + len(plan)
        ids[row, :whole] = torch.tensor([*prompt, *plan], device=device)
        mask[row, :whole] = 1
        spoken[row, len(prompt) : whole] = 1
    return ids, mask, spoken


def _tokens(model: ChatModel, example: Example) -> tuple[list[int], list[int]]:
    """Return the prompt, and the plan with the token that ends a turn."""
    plan = model.tokenizer(example.completion, add_special_tokens=False)["input_ids"]
    return model.tokens(example.prompt), [*plan, model.tokenizer.eos_token_id]
