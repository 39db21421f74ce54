"""The workers of a world as the executor meets them: messages in, an answer and its tokens out.

A worker knows only its messages. It reads the question if it was granted, its subtask (`subtask_wording.py`), and of
the earlier steps what they say: a plan for the wrong kind of task is a bad one, an answer is right if it is what the
question comes to, and whose hand an answer has been through shows in its words. The dice are hashes: the same call
under the same seed gets the same answer.
"""

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from app.core.message.chat import Message
from app.core.sampling import draw
from app.lab import world
from app.lab.subtask_wording import role_of, shift
from app.lab.world import OUTPUT, PER_LEVEL, QUESTION, TRAITS, Profile
from app.providers.rehearsal.fenced_steps import FencedStep, read_steps
from app.providers.rehearsal.task_families import DOMAINS, Problem, read

METHODS: Mapping[str, str] = {
    "numbers": "split it into single operations, carry them out one by one, then estimate the size of the result",
    "equations": "write it as an equation, bring the unknown to one side, then put the value back in",
    "words": "write the words below each other, go through them one at a time, then count them again",
    "calendar": "go month by month, mind the lengths of months and leap years, then check with the weekday",
}
HANDS: Mapping[str, str] = {
    "atlas": "quickly", "birch": "neatly", "cedar": "carefully", "delta": "plainly", "ember": "thoroughly",
    "flint": "strictly", "grove": "briefly", "heron": "calmly",
}  # fmt: skip
"""The beginning of each worker's answers, by which it recognises its own."""
CANNOT_KNOW = "I was not shown what this needs, so I cannot know."
SUBTASK = re.compile(r"^Your subtask:\s*(.*)\Z", re.MULTILINE | re.DOTALL)
ANSWER = re.compile(r"(?P<hands>[A-Za-z, ]+): the answer is (?P<answer>.*)\.", re.DOTALL)
PLAN = re.compile(r"Plan: (?P<method>.*)\.", re.DOTALL)


class Reply(Struct, frozen=True):
    """A worker's words, and the tokens that the world counts for reading and writing."""

    text: str
    input_tokens: int
    output_tokens: int


class _EarlierStep(Struct, frozen=True):
    """An earlier step as its reader takes it: a plan, an answer with the hands it went through, or neither."""

    role: str
    method: str = ""
    answer: str = ""
    hands: tuple[str, ...] = ()


def reply(worker: Profile, messages: Sequence[Message], seed: str) -> Reply:
    """Return this worker's answer to these messages."""
    problem, role, subtask, steps = _read(messages)
    input_tokens = sum([OUTPUT[step.role] for step in steps])
    text = CANNOT_KNOW
    if problem is not None:
        input_tokens += QUESTION + PER_LEVEL * problem.level
        shifted = world.shift_skills(worker, shift(subtask, problem.domain))
        text = _answer(shifted, problem, role, steps, seed)
    if text == CANNOT_KNOW:
        return Reply(text, input_tokens, OUTPUT["nothing"])
    return Reply(text, input_tokens, OUTPUT[role])


def final_answer(text: str) -> str:
    """Return the answer that a text states, or an empty string."""
    match = ANSWER.fullmatch(text)
    if match is None:
        return ""
    return match.group("answer")


def _read(messages: Sequence[Message]) -> tuple[Problem | None, str, str, list[_EarlierStep]]:
    """Return the task if it was granted, the role that is asked for and the words that ask for it, and the earlier
    steps."""
    user_texts = [message.text for message in messages if message.role == "user"]
    last = user_texts[-1] if user_texts else ""
    steps = read_steps(last)
    end_of_steps = steps[-1].end if steps else 0
    assigned = SUBTASK.search(last[end_of_steps:])
    if assigned is None:
        return read(last), "solve", "", []
    problem = None
    if len(user_texts) > 1:
        problem = read(user_texts[-2])
    return problem, role_of(assigned.group(1)), assigned.group(1), list(map(_read_step, steps))


def _read_step(step: FencedStep) -> _EarlierStep:
    role, text = role_of(step.subtask), step.answer
    if match := ANSWER.fullmatch(text):
        return _EarlierStep(role, answer=match.group("answer"), hands=_hands(match.group("hands")))
    if match := PLAN.fullmatch(text):
        return _EarlierStep(role, method=match.group("method"))
    return _EarlierStep("nothing")


def _hands(text: str) -> tuple[str, ...]:
    return tuple(text.casefold().split(", then "))


def _answer(worker: Profile, problem: Problem, role: str, steps: Sequence[_EarlierStep], seed: str) -> str:
    trait = TRAITS[draw(f"trait|{problem.text}") < 0.5]
    luck = draw(f"{seed}|{worker.name}|{role}|{problem.text}|{steps}")
    answers = [step for step in steps if step.answer]
    if role == "plan":
        domain = problem.domain
        if luck >= world.plan_chance(worker, problem.level, len(steps)):
            domain = (domain + 1) % len(DOMAINS)
        return f"Plan: {METHODS[DOMAINS[domain]]}."
    if role == "check" and answers:
        return _check(worker, problem, trait, answers[-1], len(steps) - 1, luck)
    if role == "combine" and len(answers) > 1:
        return _combine(worker, problem, trait, answers, len(steps) - len(answers), luck)
    if role in ("check", "combine"):
        return CANNOT_KNOW
    methods = [step.method for step in steps if step.method]
    plan = None
    if methods:
        plan = int(methods[-1] == METHODS[DOMAINS[problem.domain]])
    crowd = len(steps) - bool(methods)
    if luck < world.solve_chance(worker, problem.kind, trait, role, plan, crowd):
        return _say(worker, (), problem.answer)
    return _say(worker, (), problem.slip)


def _check(worker: Profile, problem: Problem, trait: float, answer: _EarlierStep, crowd: int, luck: float) -> str:
    right = answer.answer == problem.answer
    own = HANDS[worker.name] in answer.hands
    if luck < world.check_chance(worker, problem.kind, trait, right, own, crowd):
        return _say(worker, answer.hands, problem.answer)
    if right:
        return _say(worker, answer.hands, problem.slip)
    return _say(worker, answer.hands, answer.answer)


def _combine(
    worker: Profile, problem: Problem, trait: float, answers: Sequence[_EarlierStep], crowd: int, luck: float
) -> str:
    wrong: list[str] = []
    hands: list[str] = []
    for answer in answers:
        hands += answer.hands
        if answer.answer != problem.answer:
            wrong.append(answer.answer)
    right = len(answers) - len(wrong)
    if luck < world.combine_chance(worker, problem.kind, trait, right, len(answers), crowd):
        return _say(worker, hands, problem.answer)
    if wrong:
        return _say(worker, hands, wrong[0])
    return _say(worker, hands, problem.slip)


def _say(worker: Profile, before: Sequence[str], answer: str) -> str:
    hands = ", then ".join(dict.fromkeys([*before, HANDS[worker.name]]))
    return f"{hands.capitalize()}: the answer is {answer}."
