"""GRPO through the executor on one GPU, from a journal to an adapter: what `deploy/docs/training.md` reports of it.

It needs `pip install 'baton[train,lab]'` and no pretrained weights. `journal` has the service carry out plans over the
rehearsal world, grades them and writes them as rollouts; `base` trains a small Llama from nothing on conductor prompts,
so that it writes plans and finds workers by their strengths, without having seen what came of any plan. `baton train`
does the rest:

    python -m tests.bench.grpo journal FOLDER --runs 6000           # no GPU needed
    python -m tests.bench.grpo base FOLDER
    baton train --backend awr --model FOLDER/base --lora 0 --warm-start FOLDER/rollouts.jsonl --out FOLDER/awr
    python -m tests.bench.grpo profile FOLDER/times.csv train --backend trl --model FOLDER/awr/model --out FOLDER/trl
    python -m tests.bench.grpo judge FOLDER/awr/model FOLDER/trl/adapter --questions 1000

`profile` runs a command of Baton's and notes how long TRL's parts took. `judge` asks a base and its adapter for plans
for questions that policy gradients have not met, and has them carried out; it also compares bfloat16 with float32.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
from jinja2 import Template

from app.__main__ import main as run_baton
from app.cli.embedded.process import service_process
from app.core.pool.catalog import Limits, Worker
from app.lab import search, world_file
from app.lab.grading import grader
from app.lab.lessons import draw_lesson
from app.lab.plan_execution import Executor, Place, PlanResult
from app.lab.reward import reward
from app.lab.rollouts import Example, Rollout, from_lines
from app.lab.subtask_wording import GENERAL, SUBJECTS, phrase
from app.lab.training_options import Recipe
from app.lab.training_questions import Question, Rule, draw_questions, draw_rules
from app.lab.world import Weights, profiles
from app.process.config import configure
from app.providers.rehearsal.task_families import Problem

TRAINED_RULES = (4_000, 0)
"""The rules that `baton train` draws its questions from: their number and seed."""
LENGTHS = (0.5, 0.3, 0.15, 0.05)
"""The shares of journaled plans of one to four steps."""
SPECIALISTS = ("mathematics", "mathematics", "text", "calendar")
"""The strength that a domain's specialist has on its card, by domain."""
SENT_AT_A_TIME = 64


def main() -> int:
    """Run one part; `--help` lists them."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.grpo", description=main.__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    journal = parts.add_parser("journal", help="write rollouts of plans drawn at random")
    journal.add_argument("folder", type=Path)
    journal.add_argument("--runs", type=int, default=6_000)
    base = parts.add_parser("base", help="train a small base model from nothing")
    base.add_argument("folder", type=Path)
    base.add_argument("--seconds", type=float, default=120.0)
    base.add_argument("--texts", type=int, default=60_000)
    base.add_argument("--hidden", type=int, default=384)
    base.add_argument("--layers", type=int, default=6)
    base.add_argument("--batch", type=int, default=128)
    base.add_argument("--rate", type=float, default=1.5e-3)
    base.add_argument("--processes", type=int, default=os.cpu_count())
    profile = parts.add_parser("profile", help="run a command of Baton's, and note how long TRL's parts took")
    profile.add_argument("file", type=Path)
    profile.add_argument("words", nargs=argparse.REMAINDER)
    judge = parts.add_parser("judge", help="compare a base with its adapter on fresh questions")
    judge.add_argument("base", type=Path)
    judge.add_argument("adapter", type=Path)
    judge.add_argument("--questions", type=int, default=1_000)
    judge.add_argument("--completion", type=int, default=128)
    judge.add_argument("--rollouts", type=Path, help="whose plans bfloat16 is compared with float32 on")
    options = parser.parse_args()
    if options.part == "journal":
        write_journal(options.folder, options.runs)
    elif options.part == "base":
        train_base(options)
    elif options.part == "profile":
        return profile_command(options.file, options.words)
    else:
        judge_adapter(options)
    return 0


# -- rollouts


@cache
def _shapes(steps: int) -> Sequence[search.Shape]:
    return tuple([shape for shape in search.shapes(steps) if len(shape) == steps])


def draw_plan(random: Random, problem: Problem, names: Sequence[str]) -> list[dict[str, Any]]:
    """Draw a plan of a sensible shape. Half of the workers are drawn from those whose card names the task's kind, if
    there are some, and most subtasks name it rightly or not at all."""
    strength = SPECIALISTS[problem.domain]
    specialists = [name for name in names if strength in profiles()[name].strengths]
    steps = []
    for role, sees in random.choice(_shapes(random.choices((1, 2, 3, 4), LENGTHS)[0])):
        candidates = names
        if specialists and random.random() < 0.5:
            candidates = specialists
        subject = random.choices((problem.domain, GENERAL, random.randrange(len(SUBJECTS))), (5, 3, 2))[0]
        subtask = phrase(random, role, subject)
        steps.append({"worker": random.choice(candidates), "subtask": subtask, "access": ["user", *sees]})
    return steps


def draw_names(random: Random) -> list[str]:
    """Draw the workers of a pool, in any order."""
    return random.sample(list(profiles()), random.randint(3, len(profiles())))


def fresh_problems(seed: int) -> Iterator[Problem]:
    """Yield training tasks of the rehearsal world that `baton train` has no rule for."""
    known = {rule.conversation[0]["content"] for rule in draw_rules(*TRAINED_RULES)}
    random = Random(seed)
    while True:
        problem = draw_lesson(random, "train").problem
        if problem.text not in known:
            yield problem


def write_journal(folder: Path, runs: int) -> None:
    """Have a service carry out plans; then `baton grade` and `baton rollouts`, into `rollouts.jsonl`."""
    from tests.harness.processes import KEY, environment, running_process

    folder.mkdir(parents=True, exist_ok=True)
    pool = world_file.pool_file(tuple(profiles().values()))
    (folder / "pool.toml").write_text(pool)
    environ = environment(folder, BATON_POOL=str(folder / "pool.toml"), BATON_BOOTSTRAP_KEY=KEY)
    random, requests, tasks = Random(1), [], []
    for _, problem in zip(range(runs), fresh_problems(1), strict=False):
        names = draw_names(random)
        steps = draw_plan(random, problem, names)
        requests.append(
            {
                "model": world_file.TIER,
                "messages": [{"role": "user", "content": problem.text}],
                "baton": {"plan": {"steps": steps}, "pool": {"allow": names}},
            }
        )
        tasks.append({"question": problem.text, "grader": {"kind": "exact", "expected": problem.answer}})
    unique = {task["question"]: json.dumps(task) for task in tasks}
    (folder / "tasks.jsonl").write_text("".join([f"{line}\n" for line in unique.values()]))
    started = time.monotonic()
    with running_process("serve", folder, environ, forked=False) as process:
        failed = asyncio.run(_send_all(process.url, KEY, requests))
    print(f"{runs} runs, {failed} of them failed, in {time.monotonic() - started:.0f} s", flush=True)
    for words in (
        ("grade", "--tasks", str(folder / "tasks.jsonl")),
        ("rollouts", str(folder / "rollouts.jsonl"), "--everybody", "--rated", "--held-out", "0.05"),
    ):
        assert run_baton(words, environ) == 0, words


async def _send_all(url: str, key: str, requests: Sequence[dict[str, Any]]) -> int:
    """Send the requests; return the number of those that failed."""
    free = asyncio.Semaphore(SENT_AT_A_TIME)
    headers = {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=SENT_AT_A_TIME)
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=120, trust_env=False) as client:

        async def send(request: dict[str, Any]) -> bool:
            async with free:
                reply = await client.post("/v1/chat/completions", json=request)
            return reply.status_code == httpx.codes.OK

        return (await asyncio.gather(*map(send, requests))).count(False)


# -- a base from nothing


def pool_workers() -> tuple[dict[str, Worker], Limits]:
    """Return the workers of the rehearsal world as conductors are shown them, and the limits of its tier."""
    with TemporaryDirectory(prefix="baton-") as folder:
        file = Path(folder, "pool.toml")
        file.write_text(world_file.pool_file(tuple(profiles().values())))
        config = configure({"BATON_POOL": str(file), "BATON_DATA_DIR": folder})
    tier = config.catalog.tier(world_file.TIER)
    assert tier is not None
    return {name: config.catalog.workers[name] for name in tier.pool}, tier.efforts[tier.effort]


def base_texts(count: int, seed: int) -> list[tuple[str, str]]:
    """Draw prompts, as the chat template writes them, with a completion each: plans as in the journal, and as many
    drills that name a worker's strengths and are answered by a plan of that worker alone."""
    from tests.vllm.tiny_model import CHATML

    random, problems, (workers, limits) = Random(seed), fresh_problems(seed), pool_workers()
    template, texts = Template(CHATML), []
    for number in range(count):
        problem, names = next(problems), draw_names(random)
        steps = draw_plan(random, problem, names)
        question = problem.text
        if number % 2:
            name = random.choice(names)
            question = f"A task for the worker with the strengths: {', '.join(workers[name].card.strengths)}."
            steps = [{"worker": name, "subtask": phrase(random, "solve", GENERAL), "access": ["user"]}]
        for step in steps:
            step["worker"] = names.index(step["worker"])
        rule = Rule(({"role": "user", "content": question},), None, "")  # type: ignore[arg-type]
        prompt = Question(rule, tuple([workers[name] for name in names]), limits).prompt
        completion = json.dumps({"steps": steps}, ensure_ascii=False, separators=(",", ":"))
        texts.append((template.render(messages=prompt, add_generation_prompt=True), completion))
    return texts


def train_base(options: argparse.Namespace) -> None:
    """Train tokenizer and model on such texts, and save both under `base`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    part = -(-options.texts // options.processes)
    texts: list[tuple[str, str]] = []
    with ProcessPoolExecutor(options.processes) as processes:
        for some in processes.map(partial(base_texts, part), range(1_000, 1_000 + options.processes)):
            texts += some
    tokenizer = _train_tokenizer(texts[:4_000])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden,
        intermediate_size=8 * options.hidden // 3 // 32 * 32,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        max_position_embeddings=4_096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")
    size = sum([weights.numel() for weights in model.parameters()])
    print(f"{size:,} parameters, {len(tokenizer)} tokens; {len(texts)} texts", flush=True)
    _teach(model, tokenizer, texts, options)
    model.save_pretrained(options.folder / "base")
    tokenizer.save_pretrained(options.folder / "base")


def _teach(model: Any, tokenizer: Any, texts: Sequence[tuple[str, str]], options: argparse.Namespace) -> None:
    """Train for the given seconds. A token of a prompt counts a tenth of one of a completion."""
    import torch

    from app.lab.train_chat import autocast

    tokens, starts = _encode(tokenizer, texts, model.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.05)
    held_out = min(512, len(texts) // 4)
    drills = tokens[1:held_out:2].long(), starts[1:held_out:2]
    started, step = time.monotonic(), 0
    while (spent := (time.monotonic() - started) / options.seconds) < 1:
        for group in optimizer.param_groups:
            falling = 0.05 + 0.95 * (1 + math.cos(math.pi * spent)) / 2
            group["lr"] = options.rate * min(1.0, (step + 1) / 100) * falling
        drawn = torch.randint(held_out, len(texts), (options.batch,), device=model.device)
        batch = tokens[drawn].long()
        with autocast(model.device.type):
            logits = model(input_ids=batch).logits[:, :-1]
        targets = batch[:, 1:]
        losses = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
        spoken = torch.arange(1, batch.shape[1], device=model.device) >= starts[drawn, None]
        counted = torch.where(spoken, 1.0, 0.1) * (targets != tokenizer.pad_token_id)
        loss = (losses * counted).sum() / counted.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 100 == 0 or step == 1:
            found = _share_found(model, tokenizer, *drills)
            print(f"base {step}: loss {float(loss):.4f}, workers found by their strengths {found:.3f}", flush=True)
    found = _share_found(model, tokenizer, *drills)
    print(f"base: {step} steps, loss {float(loss):.4f}, workers found by their strengths {found:.3f}", flush=True)


def _encode(tokenizer: Any, texts: Sequence[tuple[str, str]], device: Any) -> tuple[Any, Any]:
    """Return the tokens of the texts, padded on the right, and where each one's completion begins."""
    import torch

    encode = partial(tokenizer.backend_tokenizer.encode_batch_fast, add_special_tokens=False)
    heads = encode([prompt for prompt, _ in texts])
    tails = encode([completion + tokenizer.eos_token for _, completion in texts])
    longest = max([len(head.ids) + len(tail.ids) for head, tail in zip(heads, tails, strict=True)])
    rows = np.full((len(texts), longest), tokenizer.pad_token_id, dtype=np.int16)
    for row, head, tail in zip(rows, heads, tails, strict=True):
        row[: len(head.ids) + len(tail.ids)] = head.ids + tail.ids
    return torch.tensor(rows, device=device), torch.tensor([len(head.ids) for head in heads], device=device)


def _share_found(model: Any, tokenizer: Any, drills: Any, starts: Any) -> float:
    """Return the share of drills in which the likeliest worker is the one that is asked for."""
    import torch

    from app.lab.train_chat import autocast

    opening = tokenizer.backend_tokenizer.encode('{"steps":[{"worker":', add_special_tokens=False).ids
    with torch.no_grad(), autocast(model.device.type):
        likeliest = model(input_ids=drills).logits.argmax(2)
    places = (starts + len(opening))[:, None]
    return float((likeliest.gather(1, places - 1) == drills.gather(1, places)).float().mean())


def _train_tokenizer(texts: Sequence[tuple[str, str]]) -> Any:
    """Return a byte-level BPE that has learned from some texts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from tests.vllm.tiny_model import CHATML, END, PAD, SPLIT, START

    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2_048,
        min_frequency=2,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([text for pair in texts for text in pair], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=PAD, chat_template=CHATML, model_max_length=4_096
    )


# -- the time of TRL's parts


def profile_command(file: Path, words: Sequence[str]) -> int:
    """Run a command of Baton's in this process; add a line for each time that one of TRL's parts was entered."""
    import torch
    from trl.extras import profiling

    def note(context: Any, seconds: float) -> None:
        with file.open("a", newline="") as lines:
            csv.writer(lines).writerow((os.getpid(), context.step, context.name, f"{seconds:.4f}"))

    profiling.ProfilingContext._log_metrics = note
    status = run_baton(words)
    if torch.cuda.is_available():
        peak, name = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.get_device_name()
        print(f"{name}: at most {peak:.1f} GiB allocated", flush=True)
    return status


# -- what training came to


def judge_adapter(options: argparse.Namespace) -> None:
    """Print the rewards of the base's plans and of the adapter's for the same fresh questions."""
    from peft import PeftModel

    from app.lab.train_chat import load_model

    chat = load_model(Recipe(str(options.base), lora=0))
    rules = []
    for _, problem in zip(range(options.questions), fresh_problems(77), strict=False):
        rules.append(Rule(({"role": "user", "content": problem.text},), *_exact(problem.answer)))
    workers, limits = pool_workers()
    questions = list(draw_questions(rules, list(workers.values()), limits, len(rules), 77, random_pools=True))
    written = {"base": _write_plans(chat, questions, options.completion)}
    if options.rollouts is not None:
        with options.rollouts.open() as lines:
            rollouts = [rollout for _, rollout in zip(range(64), from_lines(lines), strict=False)]
        _compare_precision(chat, rollouts)
    adapted = PeftModel.from_pretrained(chat.model, str(options.adapter)).to(chat.model.device)
    written["adapter"] = _write_plans(type(chat)(adapted, chat.tokenizer), questions, options.completion)
    pool = world_file.pool_file(tuple(profiles().values()))
    with service_process(pool, os.environ, runs=128) as (url, key):
        place = Place(url, key, world_file.TIER, 128, float(limits.seconds) + 10)
        results = {name: asyncio.run(_carry_out(place, questions, texts)) for name, texts in written.items()}
    rewards: dict[str, list[float]] = {}
    for name, some in results.items():
        rewards[name] = [reward(result.verdict, result.usd, result.seconds, Weights()) or 0.0 for result in some]
        counts = Counter([result.verdict for result in some])
        shares = {verdict: count / len(some) for verdict, count in counts.items()}
        judged = [result for result in some if result.verdict in ("right", "wrong")]
        print(
            f"{name}: reward {_interval(rewards[name])}; {shares}; steps {_mean([r.steps for r in judged]):.2f}; "
            f"dollars {_mean([r.usd for r in judged]):.6f}; told {fmean([r.told for r in some]):.4f}; "
            f"{len(set(written[name]))} different plans",
            flush=True,
        )
    pairs = zip(rewards["base"], rewards["adapter"], strict=True)
    print(f"adapter less base: {_interval([after - before for before, after in pairs])}", flush=True)
    print(json.dumps({name: texts[:6] for name, texts in written.items()}, indent=1))


def _exact(answer: str) -> tuple[Any, str]:
    spec = {"kind": "exact", "expected": answer}
    return grader(spec), json.dumps(spec)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _interval(values: Sequence[float]) -> str:
    """Return the mean with its 95 % interval."""
    mean, half = fmean(values), 1.96 * stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]"


def _write_plans(chat: Any, questions: Sequence[Question], most: int, batch: int = 256) -> list[str]:
    """Return a plan for each question, drawn at the temperature of training."""
    import torch

    from app.lab.train_chat import autocast

    torch.manual_seed(5)
    texts: list[str] = []
    for start in range(0, len(questions), batch):
        prompts = [chat.tokens(question.prompt) for question in questions[start : start + batch]]
        longest = max(map(len, prompts))
        pad = chat.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=chat.model.device)
        with torch.no_grad(), autocast(ids.device.type):
            made = chat.model.eval().generate(
                input_ids=ids,
                attention_mask=(ids != pad).long(),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=most,
                pad_token_id=pad,
            )
        texts += chat.tokenizer.batch_decode(made[:, longest:], skip_special_tokens=True)
    return texts


async def _carry_out(place: Place, questions: Sequence[Question], texts: Sequence[str]) -> list[PlanResult]:
    async with Executor(place) as executor:
        pairs = zip(questions, texts, strict=True)
        return list(await asyncio.gather(*[executor.execute(question, text) for question, text in pairs]))


def _compare_precision(chat: Any, rollouts: Sequence[Rollout]) -> None:
    """Print how far loss and gradient of one batch in bfloat16 (`autocast`) are from those in float32."""
    import torch

    from app.lab import train_chat

    examples = [Example(rollout.prompt, rollout.completion) for rollout in rollouts]
    losses, gradients = [], []
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    kept = train_chat.autocast
    for context in (kept, lambda device: torch.autocast(device, enabled=False)):
        train_chat.autocast = context
        chat.model.zero_grad()
        loss = train_chat._loss(chat, examples) / len(examples)
        loss.backward()
        losses.append(float(loss))
        gradients.append(torch.cat([weights.grad.flatten() for weights in chat.model.parameters()]))
    train_chat.autocast = kept
    chat.model.zero_grad()
    torch.backends.cuda.matmul.allow_tf32 = allowed
    low, high = gradients
    cosine = float(torch.nn.functional.cosine_similarity(low, high, dim=0))
    print(
        f"one batch of {len(examples)}: loss {losses[0]:.6f} in bfloat16, {losses[1]:.6f} in float32; gradients: "
        f"relative difference {float((low - high).norm() / high.norm()):.4f}, cosine {cosine:.6f}",
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
