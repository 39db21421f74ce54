"""A rehearsal world as a pool file: its workers behind the executor, and a tier that takes plans over all of them."""

from collections.abc import Sequence

from app.lab.plans import STEPS
from app.lab.world import INPUT_SHARE, Profile

TIER = "baton-world"


def pool_file(workers: Sequence[Profile], delay: float = 0.0, conductor: str = "", model: str = "conductor") -> str:
    """Return the TOML text. `delay` is the factor on the workers' seconds; `conductor` is the base URL of a server
    whose `model` plans, else the first worker answers alone."""
    names = ", ".join([f'"{worker.name}"' for worker in workers])
    planner = f'{{ kind = "fixed", workers = [{names}] }}'
    parts = [WORLD.format(delay=delay), *map(_worker, workers)]
    if conductor:
        planner = '{ kind = "model", worker = "planner", probe = 0 }'
        parts.append(CONDUCTOR.format(url=conductor, model=model))
    return "".join([*parts, TIERS.format(tier=TIER, names=names, planner=planner, steps=STEPS)])


def _worker(worker: Profile) -> str:
    strengths = ", ".join([f'"{word}"' for word in worker.strengths.split()])
    return WORKER.format(
        name=worker.name, input=worker.price * INPUT_SHARE, output=worker.price, strengths=strengths, speed=worker.pace
    )


WORLD = """
[providers.world]
format = "rehearsal"
options = {{ world = "standard", delay = "{delay:g}" }}
"""
WORKER = """
[workers.{name}]
provider = "world"
model = "{name}"
price = {{ input = {input:.6f}, output = {output:.6f}, cached = 0 }}
strengths = [{strengths}]
speed = {speed:g}
"""
CONDUCTOR = """
[providers.conductor]
format = "openai"
base_url = "{url}"
options = {{ positional = true, logprobs = true }}

[workers.planner]
provider = "conductor"
model = "{model}"
price = {{ input = 0, output = 0, cached = 0 }}
pooled = false
"""
TIERS = """
[tiers.{tier}]
pool = [{names}]
conductor = {planner}
limits = {{ steps = {steps}, attempts = 2, seconds = 120, output_tokens = 1000 }}
"""
