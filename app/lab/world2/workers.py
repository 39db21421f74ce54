"""Worker profiles, the cards that a conductor reads of them, and pools; which of them are held out from training.

Profiles are drawn once from the published spreads and are the same in every process. A card shows what an operator can
measure: right answers by domain with the number of questions, price, speed, context, and whether data is retained. It
is a sample, so that it errs as real cards do. Whether a pool is held out says the SHA-256 of its workers' names.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import cache
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from app.lab.world2.constants import DOMAINS, TRAITS, constants

SEEN, UNSEEN = 40, 24
"""Profiles that training meets, and profiles that it never meets."""
SMALLEST, LARGEST = 3, 5
PRICE_FACTORS, HELD_OUT_FACTORS = (0.5, 1.0, 2.0), (0.7, 1.4)
SAMPLES = (8, 20, 60)
"""Questions of each domain that a card's pass rates were measured with."""
PRICE_SLOPE, PRICE_NOISE = 0.2, 0.15
"""How a price's place in the range of prices, by ratio, goes with ability (in deviations), and its own spread."""
SYLLABLES = (
    "bel", "cor", "dan", "fer", "gol", "hal", "jor", "kan", "lim", "mor", "nel", "pav", "ros", "sil", "tor", "vin",
)  # fmt: skip


class Card(Struct, frozen=True):
    """The measured card of a worker: by domain, how many of `questions` it answered rightly, step by step."""

    right: tuple[int, ...]
    questions: int
    price: float
    """Dollars per million output tokens."""
    speed: float
    """Output tokens per second."""
    context: int
    retains: bool

    def words(self) -> str:
        """Return the card in words and numbers."""
        rates = [f"{name} {right} of {self.questions}" for name, right in zip(DOMAINS, self.right, strict=True)]
        data = "retains nothing"
        if self.retains:
            data = "retains what it reads"
        return (
            f"right answers: {', '.join(rates)}; "
            f"${self.price:.2f} per million output tokens, {self.speed:.0f} tokens a second, "
            f"context of {self.context:,} tokens, {data}"
        )


class Worker(Struct, frozen=True):
    """One worker as the world knows it. Ability and edges, by domain, are in logits and hidden from conductors."""

    name: str
    ability: float
    edges: tuple[float, ...]
    card: Card

    @property
    def price(self) -> float:
        """Return the dollars per million output tokens."""
        return self.card.price


Pool = tuple[Worker, ...]


@cache
def worker_profiles(*, unseen: bool) -> Pool:
    """Return the profiles of training, or those that are held out."""
    random = Random(f"world-2|workers|{unseen}")
    count = SEEN
    if unseen:
        count = UNSEEN
    return tuple([_draw_worker(random, place, unseen) for place in range(count)])


def is_held_out(names: Sequence[str]) -> bool:
    """Return True if pools of just these workers are held out from training: one in four, by SHA-256."""
    return hashlib.sha256("|".join(sorted(names)).encode()).digest()[0] % 4 == 0


def draw_pool(random: Random, *, unseen_pool: bool = False, unseen_workers: bool = False) -> Pool:
    """Draw three to five workers. `unseen_pool`: a set of workers and prices that training never meets;
    `unseen_workers`: workers, and so pools, that it never meets, at such prices."""
    profiles = worker_profiles(unseen=unseen_workers)
    while True:
        chosen = random.sample(profiles, random.randint(SMALLEST, LARGEST))
        if unseen_workers or is_held_out([worker.name for worker in chosen]) == unseen_pool:
            break
    factors: tuple[float, ...] = PRICE_FACTORS
    if unseen_pool or unseen_workers:
        factors = HELD_OUT_FACTORS
    return tuple([_with_price_factor(worker, random.choice(factors)) for worker in chosen])


def logistic(value: float) -> float:
    """Return the chance of this logit."""
    return 1 / (1 + math.exp(-value))


def pass_rate(ability: float, edge: float, domain: int) -> float:
    """Return the chance of a right answer, step by step, to a question of one part of average difficulty."""
    world = constants()
    margin = ability + edge + world.reason[domain]
    return sum([logistic(margin - world.trait_sd * trait) for trait in TRAITS]) / len(TRAITS)


def _with_price_factor(worker: Worker, factor: float) -> Worker:
    return replace(worker, card=replace(worker.card, price=worker.card.price * factor))


def _draw_worker(random: Random, place: int, unseen: bool) -> Worker:
    world = constants()
    z = random.gauss(0, 1)
    ability = world.ability_mean + world.ability_sd * z
    edges = [random.gauss(0, world.edge_sd) for _ in DOMAINS]
    rank = min(1.0, max(0.0, 0.5 + PRICE_SLOPE * z + random.gauss(0, PRICE_NOISE)))
    questions = random.choice(SAMPLES)
    card = Card(
        right=draw_pass_counts(random, ability, edges, questions),
        questions=questions,
        price=round(world.price_low * (world.price_high / world.price_low) ** rank, 3),
        speed=round(world.speed_high * (world.speed_low / world.speed_high) ** rank),
        context=int(world.contexts[min(2, int(3 * rank))]),
        retains=random.random() < world.retains,
    )
    return Worker(_worker_name(place, unseen), ability, tuple(edges), card)


def draw_pass_counts(random: Random, ability: float, edges: Sequence[float], questions: int) -> tuple[int, ...]:
    """Draw for each domain how many of so many questions a worker answers rightly, step by step."""
    counts = []
    for domain, edge in enumerate(edges):
        counts.append(draw_pass_count(random, pass_rate(ability, edge, domain), questions))
    return tuple(counts)


def draw_pass_count(random: Random, rate: float, questions: int) -> int:
    """Draw the number of right answers to so many questions, each of which is answered rightly with the chance
    `rate`."""
    return sum([random.random() < rate for _ in range(questions)])


def _worker_name(place: int, unseen: bool) -> str:
    first, second = divmod(place, len(SYLLABLES))
    endings: tuple[str, ...] = ("eth", "ona", "uri")
    if unseen:
        endings = ("ix", "ael")
    return SYLLABLES[second] + endings[first]
