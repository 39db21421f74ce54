"""A step sees exactly what its access list grants, byte for byte the same every time."""

import re
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from app.core.message.chat import Image, Message, Task, Text, ToolCall
from app.core.plan.workflow import Access
from app.core.run.visibility import INTRODUCTION, EarlierStep, ToolUse, compose, visible_steps

TASK = Task((Message("system", (Text("Be brief."),)), Message("user", (Text("What is 2 + 2?"), Image("data:x")))))
PLAN, CHECK = EarlierStep(0, "Plan it", "First add."), EarlierStep(1, "", "It is 4.")


def words(messages: tuple[Message, ...]) -> str:
    """All text of some messages."""
    return "\n".join(message.text for message in messages)


def test_a_step_that_adds_nothing_passes_the_conversation_on() -> None:
    assert compose(TASK, "", ()) is TASK.messages


def test_a_subtask_comes_behind_the_conversation() -> None:
    assert compose(TASK, "Solve it.", ()) == (*TASK.messages, Message("user", (Text("Your subtask:\nSolve it."),)))


def test_without_user_no_byte_of_the_conversation_appears() -> None:
    [message] = compose(None, "Solve it.", (PLAN,))
    assert message.role == "user"
    assert "brief" not in message.text
    assert "2 + 2" not in message.text


def test_earlier_steps_stand_in_fenced_blocks_in_order() -> None:
    [message] = compose(None, "Join.", (PLAN, CHECK))
    assert message.text.startswith(INTRODUCTION)
    opened = re.findall(r'<step index="(\d)" id="(\w{16})">', message.text)
    assert [index for index, _ in opened] == ["0", "1"]
    [nonce] = {nonce for _, nonce in opened}
    assert message.text.count(f'</step id="{nonce}">') == 2
    assert "<subtask>Plan it</subtask>\n<answer>First add.</answer>" in message.text
    assert message.text.count("<subtask>") == 1
    assert message.text.endswith("Your subtask:\nJoin.")


def test_without_a_subtask_the_final_answer_is_asked_for() -> None:
    assert compose(TASK, "", (PLAN,))[-1].text.endswith("Give the final answer to the task.")


def test_only_listed_steps_that_said_something_are_granted() -> None:
    earlier_steps = {0: PLAN, 1: CHECK, 2: EarlierStep(2, "x", "")}
    assert visible_steps(Access(True, (1, 0, 1, 2, 7)), earlier_steps) == (PLAN, CHECK)
    assert visible_steps(Access(True, ()), earlier_steps) == ()


def test_a_fence_that_stands_in_a_text_is_not_used() -> None:
    first = re.findall(r'id="(\w{16})"', words(compose(None, "x", (PLAN,))))[0]
    copied = words(compose(None, "x", (EarlierStep(0, "Plan it", f"First add. {first}"),)))
    assert set(re.findall(r'<step index="0" id="(\w{16})"', copied)).isdisjoint({first})


def test_the_fence_is_drawn_again_until_no_text_holds_it() -> None:
    """A collision cannot be found by trying, so the texts here hold every fence but those of a second draw."""

    class Anything(str):
        lookups = 0

        def __contains__(self, _key: object) -> bool:
            Anything.lookups += 1
            return Anything.lookups == 1

    plain = words(compose(None, "x", (PLAN,)))
    with_collision = words(compose(None, Anything("x"), (PLAN,)))
    assert Anything.lookups == 2
    assert re.findall(r'id="(\w{16})"', plain)[0] != re.findall(r'id="(\w{16})"', with_collision)[0]


CALLS = (ToolCall("theirs-1", "look", '{"q":"a"}'), ToolCall("theirs-2", "look", "{}"))
SAID = Message("assistant", (Text("Let me see."),), calls=CALLS, keepsake={"signature": "s"})
CAME = (
    Message("tool", (Text("found"),), call_id="ours-1"),
    Message("tool", (Text("boom"),), call_id="ours-2", failed=True),
    Message("user", (Text("And hurry."),)),
)
USED = ToolUse("ada", SAID, ("ours-1", "ours-2"), CAME)


def test_a_step_goes_on_with_its_own_transcript_under_the_ids_that_its_worker_knows() -> None:
    *before, assistant_turn, first_result, second_result, hurry = compose(TASK, "Solve it.", (PLAN,), (USED,), "ada")
    assert tuple(before) == compose(TASK, "Solve it.", (PLAN,))
    assert assistant_turn is SAID
    assert (first_result.call_id, first_result.text, second_result.call_id, second_result.failed) == (
        "theirs-1",
        "found",
        "theirs-2",
        True,
    )
    assert hurry is CAME[2]
    assert compose(TASK, "", (), (USED,), "ada")[:2] == TASK.messages


def test_another_worker_gets_the_transcript_without_what_the_first_ones_provider_wants_back() -> None:
    assistant_turn = compose(TASK, "", (), (USED, USED), "bob")[2]
    assert assistant_turn == replace(SAID, keepsake=None)


def test_without_user_the_users_words_after_the_results_are_left_out() -> None:
    assert [message.role for message in compose(None, "x", (), (USED,), "ada")] == ["user", "assistant", "tool", "tool"]


@settings(max_examples=40, deadline=None)
@given(st.integers(0), st.booleans(), st.integers(2, 5))
def test_no_byte_of_another_steps_transcript_is_seen(seed: int, user: bool, steps: int) -> None:
    """Whatever is granted: of other steps only the answer, of its own transcript everything."""
    random = Random(seed)
    secrets = {(n, what): f"{random.getrandbits(128):032x}" for n in range(steps) for what in PARTS}
    used = {}
    for step in range(steps):
        used[step] = _make_tool_use(*(secrets[step, what] for what in PARTS))
    earlier_steps = {n: EarlierStep(n, f"subtask {n}", f"answer {n}") for n in range(steps - 1)}
    me = steps - 1
    task = TASK if user else None
    access = Access(user, tuple(n for n in earlier_steps if random.random() < 0.7))
    prompt = repr(compose(task, "Go on.", visible_steps(access, earlier_steps), (used[me], used[me]), "ada"))
    for (n, what), secret in secrets.items():
        assert (secret in prompt) == (n == me and (user or what != "user")), (n, what)


PARTS = ("text", "id", "name", "arguments", "result", "keepsake", "user")


def _make_tool_use(text: str, id_: str, name: str, arguments: str, result: str, keepsake: str, user: str) -> ToolUse:
    call = ToolCall(id_, name, arguments)
    assistant_turn = Message("assistant", (Text(text),), calls=(call,), keepsake={"x": keepsake})
    came = Message("tool", (Text(result),), call_id="ours")
    return ToolUse("ada", assistant_turn, ("ours",), (came, Message("user", (Text(user),))))


@settings(max_examples=40, deadline=None)
@given(st.integers(0), st.booleans(), st.lists(st.text(max_size=20), min_size=1, max_size=5))
def test_what_is_not_listed_is_not_seen(seed: int, user: bool, texts: list[str]) -> None:
    random = Random(seed)
    canaries = [f"{random.getrandbits(128):032x}" for _ in texts]
    earlier_steps = {
        n: EarlierStep(n, f"s-{canary}", text + canary)
        for n, (text, canary) in enumerate(zip(texts, canaries, strict=True))
    }
    listed = tuple(n for n in earlier_steps if random.random() < 0.5)
    access = Access(user, listed)
    task = Task((Message("user", (Text("user-canary"),)),)) if user else None
    prompt = compose(task, "Go on.", visible_steps(access, earlier_steps))
    assert prompt == compose(task, "Go on.", visible_steps(access, earlier_steps))
    assert ("user-canary" in words(prompt)) == user
    assert [n for n, canary in enumerate(canaries) if canary in words(prompt)] == list(listed)
