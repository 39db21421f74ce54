"""The rehearsal workers' hidden skills, and their answers to the messages that they are shown.

A skill is the probability of a right answer, by family and difficulty. The dice are hashes of the worker, the question
and the seed: the same call always gets the same answer. A worker knows only its messages: one that sees neither the
question nor an earlier step says so.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from app.core.message.chat import Message
from app.core.sampling import draw
from app.providers.rehearsal.fenced_steps import read_steps
from app.providers.rehearsal.question_families import PLANS, solve
from app.providers.rehearsal.solved_question import SolvedQuestion, plain

SUBTASK = re.compile(r"^Your subtask:\s*", re.MULTILINE)
FINAL = re.compile(r"the answer is:?\s+(\S.*)$", re.IGNORECASE | re.MULTILINE)

TRUST, PLAN_HELPS, CHECK_HELPS = 0.85, 0.35, 0.15
CANNOT_KNOW = "I was not shown the question, so I cannot know the answer."
OUTSIDE = (
    "This is Baton's rehearsal pool: simulated workers inside the service, not language models. They solve small "
    f"checkable tasks only ({', '.join(PLANS)}), for example 'What is 17 * 23?'. For real answers set a provider key "
    "such as OPENAI_API_KEY or ANTHROPIC_API_KEY, or a pool file with BATON_POOL, and start Baton again."
)


class SimulatedWorker(Struct, frozen=True):
    """The probabilities of a worker to answer easy and hard questions right; `strong` families have their own."""

    easy: float
    hard: float
    strong: Mapping[str, tuple[float, float]] = {}
    checks: float = 0.0
    """The least skill with which it judges somebody else's answer."""

    def skill(self, solved: SolvedQuestion) -> float:
        """Return the probability that it solves this question without help."""
        return self.strong.get(solved.family, (self.easy, self.hard))[solved.hard]


def simulated_workers() -> dict[str, SimulatedWorker]:
    """Return the workers of the rehearsal pool, by model name."""
    return {
        "sage": SimulatedWorker(1.0, 0.6),
        "abacus": SimulatedWorker(0.75, 0.4, dict.fromkeys(("arithmetic", "equations", "number theory"), (1.0, 0.95))),
        "almanac": SimulatedWorker(0.75, 0.4, dict.fromkeys(("dates", "unit conversion"), (1.0, 0.95))),
        "scribe": SimulatedWorker(0.8, 0.4, dict.fromkeys(("words", "extraction", "roman numerals"), (1.0, 0.95))),
        "lawyer": SimulatedWorker(0.85, 0.5, {"logic": (1.0, 0.95)}, checks=0.9),
    }


class StepContent(Struct, frozen=True):
    """The content of a worker's messages: the caller's question if it may see it, earlier answers, its subtask."""

    question: str
    subtask: str
    answers: tuple[str, ...]


def read(messages: Sequence[Message]) -> StepContent:
    """Take a step's messages apart, as `run/visibility.py` composed them; a plain conversation has only a question."""
    user_texts = [message.text for message in messages if message.role == "user"]
    last = user_texts[-1] if user_texts else ""
    steps = read_steps(last)
    tail = last[steps[-1].end :] if steps else last
    mark = SUBTASK.search(tail)
    if mark is None:
        return StepContent(last, "", ())
    question = user_texts[-2] if len(user_texts) > 1 else ""
    return StepContent(question, tail[mark.end() :].strip(), tuple(step.answer.strip() for step in steps))


def reply(model: str, messages: Sequence[Message], seed: str) -> str:
    """Return this worker's whole answer to these messages."""
    content = read(messages)
    source = content.question
    solved = solve(source)
    if solved is None:
        source = content.subtask
        solved = solve(source)
    if solved is None:
        return _without_question(content)
    if _wants_plan(content.subtask):
        return f"Plan: {PLANS[solved.family]}."
    worker = simulated_workers().get(model, SimulatedWorker(0.85, 0.55))
    answer = _decide(worker, solved, content.answers, f"{seed}|{model}|{plain(source)}")
    if re.search(r"\bonly (?:with )?(?:the|a|one) (?:number|answer|result|word|name)", f"{source} {content.subtask}"):
        return answer
    return f"The answer is {answer}."


def find_final_answer(answer: str) -> str | None:
    """Return the final answer that an earlier step stated, if it stated one."""
    stated = FINAL.findall(answer)
    if not stated:
        return None
    last: str = stated[-1]
    return last.rstrip().removesuffix(".")


def _decide(worker: SimulatedWorker, solved: SolvedQuestion, answers: Sequence[str], dice_prefix: str) -> str:
    """Solve, follow a plan, check one earlier answer, or weigh several."""
    stated = [answer for answer in map(find_final_answer, answers) if answer is not None]
    skill = worker.skill(solved)
    if answers and not stated:
        skill += PLAN_HELPS * (1 - skill)
    if stated:
        skill = max(skill + CHECK_HELPS * (1 - skill), worker.checks)
    right = draw(f"{dice_prefix}|solve") < skill
    own = solved.answer
    if not right:
        own = solved.wrong[int(draw(f"{dice_prefix}|slip") * len(solved.wrong))]
    if not stated or right:
        return own
    votes = Counter(map(plain, stated)).most_common()
    if len(votes) > 1 and votes[0][1] == votes[1][1] and plain(own) in dict(votes):
        return own
    most_common = next(answer for answer in stated if plain(answer) == votes[0][0])
    if draw(f"{dice_prefix}|trust") < TRUST:
        return most_common
    return own


def _without_question(content: StepContent) -> str:
    """Pass on what earlier steps stated, or say what is missing, where it saw no question that it can solve."""
    answers = [answer for answer in map(find_final_answer, content.answers) if answer is not None]
    if answers:
        majority = Counter(map(plain, answers)).most_common(1)[0][0]
        return f"The answer is {next(answer for answer in answers if plain(answer) == majority)}."
    if not content.question:
        return CANNOT_KNOW
    return OUTSIDE


def _wants_plan(subtask: str) -> bool:
    """Return True if the subtask asks for a plan and not for an answer by one."""
    wants = re.search(r"\b(?:plan|outline|work out how|strategy)\b", subtask, re.IGNORECASE)
    return bool(wants) and not re.search(r"final answer|following the plan|follow the plan", subtask, re.IGNORECASE)
