"""An operator changes what serves a tier, and takes the change back, through the whole service.

`running_service` ends with the independent auditor, who finds each served run's pool, limits and planning requests to
be those of the subject that had been put in force.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from app.core.pool.conductor_versions import ChangeKind, versions_in_force
from app.core.pool.policy import Overrides
from app.core.pool.serving import TIER
from app.core.rating.shadows import notes_from_json, policy_of, shadow_id
from app.core.run.events import RunAdmitted, facts
from app.core.run.kinds import Kind
from app.engine.conductors.versions import RequestedChange, check_service, make_change
from app.engine.conductors.watch import PromotionWatch
from app.engine.runs.shadows import Shadows
from app.errors import ConfigInvalid
from app.process.config import configure
from app.process.wiring import Runtime
from app.store.protocol import PROCESS, AdminEventQuery
from tests.harness.in_process import (
    ANSWERS,
    await_ended_row,
    bodies_of,
    client_of,
    events,
    finish,
    limits_with,
    order,
    plan_text,
    pool_text,
    running_service,
    script_answers,
)
from tests.stubs import Fail, ProviderStub, Reply

PLAN = Reply(chunks=(plan_text((2, "Solve it.", ["user"])),))
STATED = "\n[tiers.baton-mini.promotion]\nmin_pairs = 2\nmax_degraded = 0.05\n"
NEXT = """
[tiers.baton-next]
pool = ["gamma", "delta"]
conductor = {{ kind = "fixed", shape = "single", workers = ["delta"] }}
limits = {{ steps = 9, attempts = 2, seconds = 20, output_tokens = 4000 }}

[workers.delta]
provider = "stub"
model = "delta"
price = {{ input = "1", output = "2" }}
clearance = ["open"]
"""


def pool(stub: ProviderStub, *more: str) -> str:
    """The pool file, with a further tier that has a worker of its own."""
    return pool_text(stub) + NEXT.format() + "".join(more)


async def put(runtime: Runtime, kind: ChangeKind, subject: str = "", share: float = 0.0) -> None:
    """Make a change of what serves `baton-mini`, as a command does, and let the gateway look."""
    context = runtime.context
    change = RequestedChange(f"{TIER}baton-mini", kind, subject, share)
    possible = await check_service(context.store, context.catalog(), change)
    await make_change(context.store, possible, name=context.name("change"), by=PROCESS)
    await runtime.versions.look()


async def serve_caller(runtime: Runtime, run: str = "", **changes: Any) -> tuple[str, dict[str, Any]]:
    """Return the answer to a caller of `baton-mini`, and the body of the run's admission."""
    followed_run = await runtime.runs.start(replace(order(runtime, "baton-mini", **changes), run=run))
    text = "".join((await finish(followed_run)).texts)
    await await_ended_row(runtime.context.store, followed_run.run)
    (admitted,) = bodies_of(await events(runtime, followed_run.run), Kind.ADMITTED)
    return text, {**admitted, "run": followed_run.run}


async def test_callers_of_a_tier_are_served_by_what_was_put_in_its_place(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        stub.always("delta", Reply(chunks=("From delta.",)))
        async with running_service(tmp_path, pool(stub)) as runtime:
            text, admitted = await serve_caller(runtime)
            assert (text, "served_by" in admitted) == (ANSWERS["alpha"], False)
            await put(runtime, "promoted", "tier baton-next")
            text, admitted = await serve_caller(runtime)
            assert (text, admitted["served_by"]) == ("From delta.", "tier baton-next")
            assert (admitted["tier"], admitted["pool"]) == ("baton-mini", ["gamma", "delta"])
            again = runtime.context.tier_of(next(facts(await events(runtime, admitted["run"]), RunAdmitted)))
            assert again is not None
            assert again.pool == ("gamma", "delta"), "another engine finds the same"
            limits = admitted["limits"]
            assert (limits["steps"], limits["attempts"], limits["seconds"]) == (5, 2, 20), "the lower of both"
            await put(runtime, "promoted", "worker beta")
            text, admitted = await serve_caller(runtime)
            assert (text, admitted["pool"], admitted["conductor"]) == (ANSWERS["beta"], ["beta"], "fixed")
            await put(runtime, "rolled_back")
            assert (await serve_caller(runtime))[0] == "From delta."
            await put(runtime, "rolled_back")
            assert (await serve_caller(runtime))[0] == ANSWERS["alpha"]


async def test_a_request_that_the_subject_cannot_take_is_served_by_the_tiers_own(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        stub.always("delta", Reply(chunks=("From delta.",)))
        secret = pool(stub).replace('model = "alpha"', 'model = "alpha"\nclearance = ["secret"]')
        async with running_service(tmp_path, secret) as runtime:
            await put(runtime, "promoted", "tier baton-next")
            plan = {"steps": [{"worker": "gamma", "subtask": "", "access": ["user"]}]}
            own: dict[str, dict[str, Any]] = {
                ANSWERS["alpha"]: {"labels": frozenset({"secret"})},
                ANSWERS["beta"]: {"overrides": Overrides(pin="beta")},
                ANSWERS["gamma"]: {"plan": plan},
            }
            for expected, changes in own.items():
                text, admitted = await serve_caller(runtime, **changes)
                assert (text, "served_by" in admitted) == (expected, False), changes
            await put(runtime, "promoted", "tier baton-ultra")
            text, admitted = await serve_caller(runtime, labels=frozenset({"secret"}))
            assert (text, "served_by" in admitted) == (ANSWERS["alpha"], False), "its conductor may not read the labels"
            await put(runtime, "rolled_back")
            for overrides in (Overrides(pin="delta"), Overrides(allow=frozenset({"alpha", "delta"}))):
                text, admitted = await serve_caller(runtime, overrides=overrides)
                assert (text, admitted["served_by"]) == ("From delta.", "tier baton-next")
            text, admitted = await serve_caller(runtime, overrides=Overrides(deny=frozenset({"alpha", "delta"})))
            denied = dict.fromkeys(("alpha", "delta"), "in the request's deny list")
            assert (text, admitted["excluded"]) == (ANSWERS["gamma"], denied)


@pytest.mark.long
async def test_a_canary_serves_its_share_and_the_same_runs_everywhere(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        async with running_service(tmp_path, pool(stub)) as runtime:
            await put(runtime, "canary", "worker gamma", 0.5)
            texts = [(await serve_caller(runtime, f"run_{number:031x}"))[0] for number in range(12)]
            assert set(texts) == {ANSWERS["alpha"], ANSWERS["gamma"]}
            now = versions_in_force(await runtime.context.store.changes())[f"{TIER}baton-mini"]
            assert (now.live, now.canary, now.share) == ("", "worker gamma", 0.5)


async def test_a_run_gets_no_shadow_under_what_has_served_it(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        tried = '[tiers.baton-mini.shadow]\nshare = 1\nworker = "gamma"\n'
        async with running_service(tmp_path, pool(stub, tried)) as runtime:
            shadows = Shadows(runtime.context, runtime.drivers)
            await shadows.look()
            await put(runtime, "promoted", "worker gamma")
            await serve_caller(runtime)
            await shadows.look()
            notes = await runtime.context.store.find_learned_state(policy_of("baton-mini"), 0)
            assert notes is not None
            assert notes_from_json(notes.body).since(0.0) == {"served": 1}


@asynccontextmanager
async def run_promoted_service(folder: Path, more: str) -> AsyncIterator[tuple[ProviderStub, Runtime, Shadows]]:
    """The service with `more` in its pool file and `baton-mini` served by `baton-next`; its providers, and the task
    that starts shadows, which has taken its first look."""
    async with ProviderStub() as stub:
        script_answers(stub)
        stub.always("delta", Reply(chunks=("From delta.",)))
        async with running_service(folder, pool(stub, more)) as runtime:
            shadows = Shadows(runtime.context, runtime.drivers)
            await shadows.look()
            await put(runtime, "promoted", "tier baton-next")
            yield stub, runtime, shadows


async def test_a_shadow_has_the_limits_of_its_own_tier_whatever_those_of_what_serves_the_run(tmp_path: Path) -> None:
    """What serves the run allows it 20 s, and the shadow's tier 30 s; the request has narrowed its money."""
    tried = '[tiers.baton-mini.shadow]\nshare = 1\ntier = "baton-again"\n'
    async with run_promoted_service(tmp_path, tried) as (_stub, runtime, shadows):
        _, admitted = await serve_caller(runtime, limits=limits_with(runtime, "baton-mini", usd=123_456))
        assert admitted["limits"]["seconds"] == 20
        await shadows.look()
        shadow = shadow_id(admitted["run"])
        await await_ended_row(runtime.context.store, shadow)
        (tried_again,) = bodies_of(await events(runtime, shadow), Kind.ADMITTED)
        assert (tried_again["limits"]["seconds"], tried_again["limits"]["usd"]) == (30, 123_456)


@pytest.mark.parametrize(
    "overrides", [Overrides(deny=frozenset({"alpha"})), Overrides(allow=frozenset({"beta", "gamma", "delta"}))]
)
async def test_what_a_request_denies_is_denied_to_its_shadow_though_something_else_has_served_it(
    tmp_path: Path, overrides: Overrides
) -> None:
    tried = '[tiers.baton-mini.shadow]\nshare = 1\nworker = "alpha"\n'
    async with run_promoted_service(tmp_path, tried) as (stub, runtime, shadows):
        _, admitted = await serve_caller(runtime, overrides=overrides)
        assert admitted["served_by"] == "tier baton-next"
        await shadows.look()
        notes = await runtime.context.store.find_learned_state(policy_of("baton-mini"), 0)
        assert notes is not None
        assert (notes_from_json(notes.body).since(0.0), stub.requests_for("alpha")) == ({"no_worker": 1}, [])


async def test_what_the_pool_file_lacks_is_refused_and_serves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        async with running_service(tmp_path, pool(stub)) as runtime:
            for subject, reason in (
                ("tier baton-none", "the pool file has no tier baton-none"),
                ("worker none", "the pool file has no worker none"),
                ("tier baton-mini", "is the tier itself"),
            ):
                with pytest.raises(ConfigInvalid, match=reason):
                    await put(runtime, "promoted", subject)
            with pytest.raises(ConfigInvalid, match="nothing to roll back"):
                await put(runtime, "rolled_back")
            await put(runtime, "promoted", "tier baton-next")
            with pytest.raises(ConfigInvalid, match="is live already"):
                await put(runtime, "promoted", "tier baton-next")
            assert (await serve_caller(runtime))[1]["served_by"] == "tier baton-next"
            (tmp_path / "pool.toml").write_text(pool_text(stub))
            runtime.install(
                configure(
                    {
                        "BATON_POOL": str(tmp_path / "pool.toml"),
                        "BATON_DATA_DIR": str(tmp_path),
                        "BATON_PEPPER": "p" * 32,
                    }
                )
            )
            await runtime.versions.look()
            (fields,) = [record.fields for record in caplog.records if "The pool file lacks" in record.getMessage()]
            assert fields["reason"].startswith("tier baton-next is to serve baton-mini, and the pool file has no tier")
            text, admitted = await serve_caller(runtime)
            assert (text, "served_by" in admitted) == (ANSWERS["alpha"], False)


@pytest.mark.long
async def test_the_callers_see_their_model_and_the_journal_says_who_served(tmp_path: Path) -> None:
    """Over HTTP: replies, the run, a plan, its edit and its execution, a replay, and the list of models."""
    async with ProviderStub() as stub:
        script_answers(stub)
        stub.always("delta", Reply(chunks=("From delta.",)))
        async with running_service(tmp_path, pool(stub)) as runtime, client_of(runtime) as client:
            await put(runtime, "promoted", "tier baton-next")
            body = {"model": "baton-mini", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
            reply = (await client.post("/v1/chat/completions", json=body)).json()
            assert (reply["model"], reply["choices"][0]["message"]["content"]) == ("baton-mini", "From delta.")
            run = (await client.get(reply["baton"]["audit"])).json()
            assert (run["tier"], run["served_by"]) == ("baton-mini", "tier baton-next")
            reply_body = (await client.get(f"/v1/runs/{run['id']}/explain")).json()
            assert reply_body["served_by"] == "tier baton-next"
            assert "served by the tier baton-next" in reply_body["text"]
            model = (await client.get("/v1/models/baton-mini")).json()["baton"]
            assert (model["served_by"], model["pool"]) == ("tier baton-next", ["gamma", "delta"])
            assert (await client.get("/v1/models/baton-ultra")).json()["baton"]["served_by"] is None
            again = await _await_end(client, f"/v1/runs/{run['id']}/replay", {"wait": 60})
            assert (again["served_by"], again["state"]) == ("tier baton-next", "succeeded")
            plan = (await client.post("/v1/plans", json=body)).json()
            assert [step["worker"] for step in plan["plan"]["steps"]] == ["delta"]
            document = (await client.post(f"/v1/plans/{plan['id']}/run", json={})).json()
            assert document["choices"][0]["message"]["content"] == "From delta."


async def _await_end(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    document = (await client.post(path, json=body)).json()
    reply_body: dict[str, Any] = (await client.get(f"/v1/runs/{document['id']}")).json()
    return reply_body


@pytest.mark.parametrize("kind", ["canary", "promoted"])
@pytest.mark.long
async def test_a_tier_that_degrades_runs_is_rolled_back_by_itself(tmp_path: Path, kind: ChangeKind) -> None:
    """It is left alone while it does well, and undone once, with the evidence, when it does not."""
    share = 0.8 if kind == "canary" else 0.0
    async with ProviderStub() as stub:
        script_answers(stub)
        stub.always("planner", PLAN)
        async with running_service(tmp_path, pool(stub, STATED)) as runtime:
            await put(runtime, "canary", "tier baton-ultra", 0.5)
            before = [(await serve_caller(runtime, f"run_{number:031x}"))[1] for number in range(8)]
            own = len([entry for entry in before if "served_by" not in entry])
            assert 2 <= own < 8
            await put(runtime, "rolled_back")
            await put(runtime, kind, "tier baton-ultra", share)
            watching = PromotionWatch(runtime.context)
            for number in range(8, 12):
                await serve_caller(runtime, f"run_{number:031x}")
            await watching.look()
            assert "tier baton-ultra" in await live(runtime)
            stub.always("planner", Fail(status=404))
            for number in range(12, 36):
                await serve_caller(runtime, f"run_{number:031x}")
            await watching.look()
            assert await live(runtime) == ("", "")
            (*_, last) = await runtime.context.store.changes()
            assert (last.kind, last.who, last.version) == ("rolled_back", "baton", "tier baton-ultra")
            note = json.loads(last.note)
            assert note["breached"] == ["max_degraded"]
            if kind == "promoted":
                assert note["tiers"][0]["conditions"][0]["count"] == own, "compared with what its own definition served"
            metrics = runtime.context.telemetry.exposition().decode()
            assert 'baton_rollbacks_total{condition="max_degraded",conductor="tier baton-mini"} 1.0' in metrics
            change_count = len(await runtime.context.store.changes())
            await watching.look()
            assert len(await runtime.context.store.changes()) == change_count
            logged = await runtime.context.store.admin_events(AdminEventQuery())
            assert ("tier.rolled_back", "baton-mini", "process") in [
                (event.action, event.target, event.via) for event in logged
            ]
            await runtime.versions.look()
            assert (await serve_caller(runtime))[0] == ANSWERS["alpha"]


async def live(runtime: Runtime) -> tuple[str, str]:
    """Return the subject that serves `baton-mini`, and the canary."""
    now = versions_in_force(await runtime.context.store.changes())[f"{TIER}baton-mini"]
    return now.live, now.canary
