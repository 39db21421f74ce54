"""Plans of this world: right ones and wrong ones, from the simulated conductor and from callers.

Every subtask carries a token of its own.
"""

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

GARBAGE = ("", "{", '{"steps": 3}', '{"steps": [{"worker": "0"', "Sure! Here is my plan: first, think hard.")


def plan_text(schema: Mapping[str, Any], call: int, hit: Callable[[str], bool], chance: Random) -> str:
    """Return what the conductor's model answers under this schema."""
    if hit("conductor.garbage"):
        return chance.choice(GARBAGE)
    further = schema["properties"]["steps"]["minItems"] == 0
    if hit("conductor.empty_plan") or (further and chance.random() < 0.4):
        return '{"steps": []}'
    places = schema["properties"]["steps"]["prefixItems"]
    workers = len(places[0]["properties"]["worker"]["enum"])
    count = chance.randint(1, len(places))
    if hit("conductor.too_many_steps"):
        count = len(places) + chance.randint(1, 2)
    steps = [_step(place, chance.randrange(workers), f"<sub:{call}.{place}>", chance) for place in range(count)]
    for step in steps if "tools" in places[0]["properties"] else ():
        step["tools"] = chance.random() < 0.4
    for step in steps if further else ():
        step["access"] += ["previous"] if chance.random() < 0.5 else []
    victim = chance.choice(steps)
    if hit("conductor.unknown_worker"):
        victim["worker"] = 99
    if hit("conductor.sees_ahead"):
        victim["access"] = ["user", count]
    return json.dumps({"steps": steps})


def callers_plan(names: tuple[str, ...], mark: str, most: int, chance: Random) -> dict[str, Any]:
    """Return a plan that comes with the request: right in form and in fact."""
    count = chance.randint(1, most)
    steps = [_step(place, chance.choice(names), f"<sub:{mark}.{place}>", chance) for place in range(count)]
    return {"steps": [{**step, "tools": chance.random() < 0.4} for step in steps]}


def _step(place: int, worker: object, mark: str, chance: Random) -> dict[str, Any]:
    earlier = [n for n in range(place) if chance.random() < 0.5]
    access: list[object] = ["user"] if chance.random() < 0.6 or not earlier else []
    return {"worker": worker, "subtask": f"{mark} Do this part.", "access": [*access, *earlier]}
