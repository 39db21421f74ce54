"""A sample of the corpus of injections; `python -m tests.isolation.injections` plays all of it."""

from pathlib import Path

import pytest

from app.core.message.chat import Message
from app.core.run.visibility import compose
from app.engine.calls.step_request import View
from tests.isolation.injection_corpus import CARRIERS, FAMILIES, FORGED_CALL, ORDERS, corpus
from tests.isolation.injections import INBOUND, OUTBOUND, TOPOLOGIES, Findings, play_scenes, sample_scenes, scenes

SAMPLE = 16


def test_the_corpus_is_large_and_has_every_family_language_and_carrier() -> None:
    every = list(corpus())
    assert len({case.text for case in every}) >= 300
    assert len(every) == len(FAMILIES) * len(ORDERS) * len(CARRIERS)
    reached = {(scene.topology, scene.inbound) for scene in scenes(every)} | {
        (scene.topology, scene.outbound) for scene in scenes(every)
    }
    without = {("tools", "completions")}
    assert reached == {(shape, wire) for shape in TOPOLOGIES for wire in (*INBOUND, *OUTBOUND)} - without


@pytest.mark.long
async def test_injections_cause_no_call_give_no_authority_and_move_no_canary(tmp_path: Path) -> None:
    chosen = sample_scenes(SAMPLE)
    assert {case.topology for case in chosen} == set(TOPOLOGIES)
    assert {case.outbound for case in chosen} == set(OUTBOUND)
    findings = await play_scenes(tmp_path, chosen)
    assert findings.wrong == []
    assert findings.runs == len(chosen)
    assert findings.calls > 2 * findings.runs


async def judge_topology(folder: Path, topology: str) -> Findings:
    """Return what is found in one run of a topology."""
    fitting = [
        scene
        for scene in scenes(corpus())
        if (scene.topology, scene.inbound, scene.repeats) == (topology, "chat", False)
    ]
    return await play_scenes(folder, fitting[:1], audits=False)


async def test_words_beyond_an_access_list_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def messages(view: View, worker: str) -> tuple[Message, ...]:
        return compose(view.task, view.subtask, view.earlier_steps, view.tool_uses, worker)

    monkeypatch.setattr(View, "messages", messages)
    findings = await judge_topology(tmp_path, "caller")
    assert any("step 1 was shown" in canary and "CANARY-user" in canary for canary in findings.canaries)


async def test_an_id_of_a_worker_and_a_call_of_an_uncleared_one_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.engine.steps.execution.mint_call_id", lambda _run, _token: FORGED_CALL)
    monkeypatch.setattr("app.core.pool.policy.permits", lambda _worker, _reading: True)
    findings = await judge_topology(tmp_path, "tools")
    assert any("an id that Baton did not mint" in fault for fault in findings.authority)
    assert any("the pool is" in fault for fault in findings.authority)
