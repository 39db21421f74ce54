"""A journal with runs of every kind, made once by the real service: what the forgeries are made from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from app.core.message.chat import Form, Message, Task, Text, Tool, Toolbox
from app.core.pool.conductor_versions import Change, ChangeKind
from app.core.run.fold import fold
from app.engine.runs import replays
from app.engine.runs.admission import Order
from app.engine.runs.approvals import Decision
from app.process.wiring import Runtime
from app.store.archive import Record, open_archive
from tests.harness.in_process import (
    await_ended_row,
    finish,
    limits_with,
    order,
    plan,
    plan_text,
    pool_text,
    running_service,
)
from tests.stubs import Fail, Hang, ProviderStub, Reply
from tests.stubs import ToolCall as Calls
from tests.stubs import Usage as Used


class Journal(Struct, frozen=True):
    """Runs by the name of their scene, and the pools that were in force."""

    runs: Mapping[str, Record]
    catalogs: Mapping[str, bytes]
    changes: Sequence[Change]
    """What was done with the conductor's versions."""
    folder: Path
    """Where the database is that they were read from."""


SELECTOR = """
[tiers.baton-learns]
pool = ["alpha", "beta", "gamma"]
conductor = { kind = "selector", templates = ["answer", "answer-check"], checkers = ["gamma"] }
limits = { steps = 3, attempts = 2, seconds = 30, output_tokens = 1000 }
"""
POOR = """
[workers.delta]
provider = "stub"
model = "delta"
price = { input = 10.00, output = 20.00, cached = 5.00 }

[tiers.baton-poor]
pool = ["delta", "beta"]
conductor = { kind = "fixed", shape = "single", workers = ["delta"] }
limits = { steps = 3, attempts = 2, seconds = 30, output_tokens = 1000 }
"""
ASKING = """
[tiers.baton-asks]
pool = ["alpha", "beta", "gamma"]
conductor = { kind = "fixed", shape = "chain", workers = ["alpha", "beta", "gamma"] }
fallback = "beta"
limits = { steps = 3, attempts = 2, seconds = 30, output_tokens = 1000 }
approval = { workers = ["alpha"] }

[tiers.baton-hurries]
pool = ["alpha", "beta", "gamma"]
conductor = { kind = "fixed", shape = "single", workers = ["alpha"] }
fallback = "beta"
limits = { steps = 3, attempts = 2, seconds = 30, output_tokens = 1000 }
approval = { workers = ["alpha"], seconds = 0.01, on_expiry = "fallback-plan" }

[tiers.baton-costs]
pool = ["alpha", "beta", "gamma"]
conductor = { kind = "fixed", shape = "single", workers = ["alpha"] }
fallback = "beta"
limits = { steps = 3, attempts = 2, seconds = 30, output_tokens = 1000 }
approval = { workers = ["alpha"], above_usd = 0, seconds = 0.01, on_expiry = "fallback-plan" }
"""
RULE = """
[rules.records-stay]
labels = ["record"]
deny = { provider = ["stub"] }
"""


async def play(folder: Path) -> Journal:
    """Run every scene and read the journal."""
    tiers = SELECTOR + POOR + ASKING + RULE
    async with ProviderStub() as stub, running_service(folder, pool_text(stub) + tiers) as runtime:
        names = {}
        for scene in SCENES:
            stub.clear()
            names[scene.__name__] = await scene(stub, runtime)
        url = runtime.pool.configuration.settings.database_url
    async with open_archive(url) as archive:
        records = {record.row["id"]: record async for record in archive.records()}
        runs = {name: records[run] for name, run in names.items()}
        return Journal(runs, await archive.catalogs(), await archive.changes(), folder)


async def _run(runtime: Runtime, tier: str, **changes: Any) -> str:
    return (await finish(await runtime.runs.start(order(runtime, tier, **changes)))).ended.state.run


async def single(stub: ProviderStub, runtime: Runtime) -> str:
    return await _run(runtime, "baton-mini")


async def chosen(stub: ProviderStub, runtime: Runtime) -> str:
    return await _run(runtime, "baton-learns")


async def chosen_for_sure(stub: ProviderStub, runtime: Runtime) -> str:
    return await _run(runtime, "baton-learns", explore=False)


async def chosen_within_means(stub: ProviderStub, runtime: Runtime) -> str:
    """Two calls cannot be paid, and one is cut."""
    return await _run(runtime, "baton-learns", limits=limits_with(runtime, "baton-learns", usd=1_000))


async def made_cheaper(stub: ProviderStub, runtime: Runtime) -> str:
    """The worker that the caller planned cannot be paid."""
    limits = limits_with(runtime, "baton-poor", usd=3_000)
    return await _run(runtime, "baton-poor", limits=limits, plan=plan(("delta", "", ["user"])))


async def replanned(stub: ProviderStub, runtime: Runtime) -> str:
    """The conductor's plans cost more than what is left, so that one worker answers alone."""
    long = plan_text(*[(0, "Draft it", ["user"])] * 4, (1, "Answer", ["user", 0, 1, 2, 3]))
    stub.script("planner", Reply(chunks=(long,)), Reply(chunks=(long,)))
    return await _run(runtime, "baton-ultra", limits=limits_with(runtime, "baton-ultra", usd=25_000, floor_tokens=1000))


async def cut_short(stub: ProviderStub, runtime: Runtime) -> str:
    """There is no money for the step that answers, and the one before it was asked for the whole answer."""
    steps = plan(("alpha", "Give the final answer.", ["user"]), ("beta", "Check it.", ["user", 0]))
    stub.script("alpha", Reply(chunks=("Four.",), usage=Used(input=40, output=900)))
    limits = limits_with(runtime, "baton-ultra", usd=2_200, floor_tokens=1000)
    return await _run(runtime, "baton-ultra", plan=steps, limits=limits)


async def streamed(stub: ProviderStub, runtime: Runtime) -> str:
    return await _run(runtime, "baton-mini", streams=True)


async def conducted(stub: ProviderStub, runtime: Runtime) -> str:
    """A chain of three that a model planned."""
    chain = plan_text((0, "Plan it", ["user"]), (1, "Solve it", ["user", 0]), (2, "Check it", [0, 1]))
    stub.script("planner", Reply(chunks=tuple(chain)))
    for worker, words in {"alpha": "A plan.", "beta": "A solution.", "gamma": "The answer."}.items():
        stub.always(worker, Reply(chunks=(words,)))
    return await _run(runtime, "baton-ultra")


async def _change(runtime: Runtime, kind: ChangeKind, version: str, share: float = 0.0) -> None:
    name = f"change_{len(await runtime.context.store.changes()):03}"
    change = Change(name, runtime.context.now(), "me", "planner", kind, version, share)
    await runtime.context.store.change(change)
    await runtime.versions.look()


async def versioned(stub: ProviderStub, runtime: Runtime) -> str:
    """Planned by a version that is promoted before and rolled back behind it."""
    stub.script("planner@1", Reply(chunks=(plan_text((0, "Solve it", ["user"])),)))
    await _change(runtime, "loaded", "planner@1")
    await _change(runtime, "promoted", "planner@1")
    run = await _run(runtime, "baton-ultra")
    await _change(runtime, "rolled_back", "planner@1")
    return run


async def repaired(stub: ProviderStub, runtime: Runtime) -> str:
    stub.script("planner", Reply(chunks=(plan_text((7, "Solve it", ["user"])),)))
    stub.script("planner", Reply(chunks=(plan_text((0, "Solve it", ["user"])),)))
    return await _run(runtime, "baton-ultra")


async def fallen_back(stub: ProviderStub, runtime: Runtime) -> str:
    stub.script("planner", *[Fail(status=400)] * 2)
    return await _run(runtime, "baton-ultra")


async def retried(stub: ProviderStub, runtime: Runtime) -> str:
    stub.script("alpha", Fail(status=503), Fail(status=503))
    return await _run(runtime, "baton-mini")


async def fanned_out(stub: ProviderStub, runtime: Runtime) -> str:
    for worker in ("alpha", "beta", "gamma"):
        stub.script(worker, Reply(header_delay=0.1))
    steps = plan(*((name, f"Try {name}", ["user"]) for name in ("alpha", "beta", "gamma")), ("alpha", "Sum", [0, 1, 2]))
    return await _run(runtime, "baton-ultra", plan=steps)


async def lost_an_input(stub: ProviderStub, runtime: Runtime) -> str:
    stub.always("*", Fail(status=400))
    steps = plan(("beta", "One", ["user"]), ("alpha", "Two", [0]))
    return await _run(runtime, "baton-ultra", plan=steps)


async def cancelled(stub: ProviderStub, runtime: Runtime) -> str:
    stub.always("alpha", Hang())
    followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
    await stub.wait_for(1, "alpha")
    runtime.runs.cancellations.ask(followed_run.run, "caller")
    await finish(followed_run)
    return followed_run.run


async def expired(stub: ProviderStub, runtime: Runtime) -> str:
    stub.always("*", Hang())
    """JSON is not cut off when the time is over, so the run waits for it until then."""
    task = Task((Message("user", (Text("What is 2 + 2?"),)),), form=Form())
    limits = limits_with(runtime, "baton-mini", seconds=0.4, attempts=1)
    return await _run(runtime, "baton-mini", limits=limits, task=task)


async def over_budget(stub: ProviderStub, runtime: Runtime) -> str:
    limits = limits_with(runtime, "baton-mini", usd=10)
    return await _run(runtime, "baton-mini", limits=limits, plan=plan(("alpha", "", ["user"])))


async def previewed(stub: ProviderStub, runtime: Runtime) -> str:
    stub.script("planner", Reply(chunks=(plan_text((0, "Solve it", ["user"])),)))
    return await _run(runtime, "baton-ultra", preview=True)


async def called_tools(stub: ProviderStub, runtime: Runtime) -> str:
    """Two turns with the caller's tools, then the answer; a step that answers nobody calls them too."""
    stub.script("alpha", Reply(tool_calls=(Calls("look", '{"q":"a"}', "their-1"),), finish="tool", chunks=("Hm.",)))
    stub.script("alpha", Reply(chunks=("It was A.",)))
    stub.script("beta", Reply(tool_calls=(Calls("look", "{}", "x"), Calls("look", "{}", "y")), finish="tool"))
    steps = plan(("alpha", "Look", ["user"]), ("beta", "Answer", ["user", 0]))
    steps["steps"][0]["tools"] = True
    messages = [Message("user", (Text("What is it?"),))]
    while True:
        task = Task(tuple(messages), toolbox=Toolbox((Tool("look", "Looks something up."),)))
        outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra", task=task, plan=steps)))
        calls = outcome.ended.calls
        if not calls:
            return outcome.ended.state.run
        messages.append(Message("assistant", (), calls=calls))
        messages += [Message("tool", (Text(f"Result {call.id[-1]}"),), call_id=call.id) for call in calls]


EMPTY = Reply(chunks=('{"steps": []}',))


async def bettered(stub: ProviderStub, runtime: Runtime) -> str:
    """Two rounds, the second of which sees what the first answered; then that is taken."""
    chain = plan_text((0, "Draft it", ["user"]), (1, "Answer it", ["user", 0]))
    for text in (chain, plan_text((2, "Look anew", ["user"]), (0, "Mend it", ["previous", 0]))):
        stub.script("planner", Reply(chunks=(text,)))
    stub.script("planner", EMPTY)
    for worker, words in {"alpha": "One.", "beta": "Two.", "gamma": "Three."}.items():
        stub.always(worker, Reply(chunks=(words,)))
    return await _run(runtime, "baton-deep", streams=True)


async def stopped(stub: ProviderStub, runtime: Runtime) -> str:
    """A further round that cannot be planned."""
    stub.script("planner", Reply(chunks=(plan_text((0, "Answer it", ["user"])),)))
    stub.script("planner", *[Fail(status=400)] * 2)
    return await _run(runtime, "baton-deep")


async def nested(stub: ProviderStub, runtime: Runtime) -> str:
    """A step that the conductor takes itself, and one in that; a plan inside is mended first."""
    outer = plan_text((0, "Draft it", ["user"]), (3, "Take it apart", [0]), (1, "Answer it", ["user", 1]))
    inner = plan_text((3, "Go deeper", ["user"]), (2, "Say it", ["user", 0]))
    for text in (outer, plan_text((9, "Nobody", ["user"])), inner, plan_text((1, "Do it", ["user"]))):
        stub.script("planner", Reply(chunks=(text,)))
    for worker, words in {"alpha": "One.", "beta": "Two.", "gamma": "Three."}.items():
        stub.always(worker, Reply(chunks=(words,)))
    return await _run(runtime, "baton-nested", limits=limits_with(runtime, "baton-nested", rounds=1))


async def alone_inside(stub: ProviderStub, runtime: Runtime) -> str:
    """The conductor is out when it is to plan for a step of its own."""
    stub.script("planner", Reply(chunks=(plan_text((3, "Do it", ["user"])),)), *[Fail(status=400)] * 2)
    return await _run(runtime, "baton-nested", limits=limits_with(runtime, "baton-nested", rounds=1))


TOOLBOX = Toolbox((Tool("look", "Looks something up."),))


async def waiting_for_results(stub: ProviderStub, runtime: Runtime) -> str:
    """A turn has ended with a tool call, and its caller has not come back."""
    stub.script("alpha", Reply(tool_calls=(Calls("look", "{}", "x"),), finish="tool"))
    task = Task((Message("user", (Text("What is it?"),)),), toolbox=TOOLBOX)
    return await _run(runtime, "baton-mini", task=task)


async def failed(stub: ProviderStub, runtime: Runtime) -> str:
    """No worker takes the request."""
    stub.always("*", Fail(status=400))
    return await _run(runtime, "baton-mini")


async def streamed_in_parts(stub: ProviderStub, runtime: Runtime) -> str:
    """A tree of four steps: two lines that are joined."""
    steps = plan(
        ("alpha", "One", ["user"]),
        ("beta", "Two", ["user", 0]),
        ("gamma", "Three", ["user"]),
        ("alpha", "Four", [1, 2]),
    )
    return await _run(runtime, "baton-ultra", plan=steps, streams=True)


async def debated(stub: ProviderStub, runtime: Runtime) -> str:
    """Two layers of two steps, the second of which reads all of the first, and a judge."""
    steps = plan(
        ("alpha", "One", ["user"]),
        ("beta", "Two", ["user"]),
        ("alpha", "Object", ["user", 0, 1]),
        ("beta", "Object", ["user", 0, 1]),
        ("gamma", "Judge", ["user", 2, 3]),
    )
    return await _run(runtime, "baton-ultra", plan=steps)


async def replayed(stub: ProviderStub, runtime: Runtime) -> str:
    """A chain of three, repeated from its last step on."""
    store = runtime.context.store
    earlier = await replays.read_run(store, await store.journal(await conducted(stub, runtime)))
    tier = runtime.pool.catalog().tiers["baton-ultra"]
    order = Order(
        task=earlier.task,
        tier=tier,
        model=tier.name,
        effort=tier.effort,
        limits=tier.efforts[tier.effort],
        tenant="tenant",
        key="key",
        explore=False,
    )
    again = replays.as_replay(order, earlier, replays.Changes(from_step=2), runtime.pool.catalog())
    return (await finish(await runtime.runs.start(replace(again, followed=True)))).ended.state.run


async def _decided(runtime: Runtime, verdict: Literal["approve", "refuse"]) -> str:
    """A run whose plan needed an approval, after somebody has decided."""
    run = await _run(runtime, "baton-asks")
    approval = fold((await runtime.context.store.journal(run)).events).approval_question
    assert approval is not None
    decision = Decision(verdict, approval.digest, "key:boss", "", reason="Because.", replacements=("gamma",))
    await runtime.runs.decide(run, None, decision)
    await await_ended_row(runtime.context.store, run)
    return run


async def approved(stub: ProviderStub, runtime: Runtime) -> str:
    """The second step's worker fails, and another one takes over that the approval names."""
    stub.script("beta", Fail(status=400))
    return await _decided(runtime, "approve")


async def refused(stub: ProviderStub, runtime: Runtime) -> str:
    return await _decided(runtime, "refuse")


async def not_approved_in_time(stub: ProviderStub, runtime: Runtime) -> str:
    """The fallback answers, which needs no approval."""
    run = await _run(runtime, "baton-hurries")
    runtime.drivers.sweep_soon()
    await await_ended_row(runtime.context.store, run)
    return run


async def not_approved_and_too_dear_to_fall_back(stub: ProviderStub, runtime: Runtime) -> str:
    """The fallback needs an approval as well, so that the run ends at once."""
    run = await _run(runtime, "baton-costs")
    runtime.drivers.sweep_soon()
    await await_ended_row(runtime.context.store, run)
    return run


SCENES = (
    single,
    chosen,
    chosen_for_sure,
    chosen_within_means,
    made_cheaper,
    replanned,
    cut_short,
    streamed,
    conducted,
    versioned,
    repaired,
    fallen_back,
    retried,
    fanned_out,
    lost_an_input,
    cancelled,
    expired,
    over_budget,
    previewed,
    called_tools,
    bettered,
    stopped,
    nested,
    alone_inside,
    waiting_for_results,
    failed,
    streamed_in_parts,
    debated,
    replayed,
    approved,
    refused,
    not_approved_in_time,
    not_approved_and_too_dear_to_fall_back,
)
RUNS = len(SCENES) + 1
"""The number of runs: the one that `replayed` repeats is none of a scene of its own."""
