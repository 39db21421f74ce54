"""The forms in which a small conductor reads cards and writes plans: each a vocabulary and an exact grammar.

    roles .... a role is one token, whose subtask is always the same; a card's strengths are one token
    words .... a subtask is written word by word, any word after any other, up to `MOST` of them; so are cards

Either way a plan's tokens, joined, are the JSON that `workflow.py` reads. A grammar is a table: from each state the
legal tokens, and to which state each leads. Mask, rollout and loss all go by it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from app.conductor import compact
from app.lab import plans, subtask_wording
from app.lab.plans import END, FIRST_WORKER, LONGEST, NEXT, SLOTS, START, STEPS, Plan, PlanStep, accesses
from app.lab.world import Profile


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """One of them. Tokens are numbered as in `tokens`; 0 begins a plan, 1 comes between steps, 2 ends it."""

    name: str
    tokens: tuple[str, ...]
    """The tokens of plans, as text."""
    states: int
    """State 0 is the beginning."""
    longest: int
    """Tokens of the longest plan."""
    rows: int
    """Rows of the mask: row n is for n workers; `roles` has as many again for second rounds."""
    legal: Callable[[int, int], Sequence[int]]
    """By state and row, exactly the tokens with which some valid plan goes on."""
    follow: Callable[[int, int], int]
    """The state after a legal token."""
    encode: Callable[[Plan], list[int]]
    decode: Callable[[Sequence[int]], Plan]
    """ValueError for what is no plan."""
    strengths: Callable[[Profile], Sequence[str]]
    """The part of a card that describes its worker's skills, as words of the prompt."""

    def text(self, written: Sequence[int]) -> str:
        """Return the text that these tokens stand for."""
        return "".join(self.tokens[token] for token in written)


# Roles.


def _legal_role(place: int, row: int) -> Sequence[int]:
    if row <= SLOTS:
        return plans.legal(place, row)
    return plans.legal_again(place, row - SLOTS)


ROLES = Form(
    "roles",
    plans.vocabulary(),
    LONGEST,
    LONGEST,
    2 * SLOTS + 1,
    _legal_role,
    lambda place, _: min(place + 1, LONGEST - 1),
    plans.to_tokens,
    plans.from_tokens,
    lambda worker: compact.card(worker.strengths.split(), worker.price)[:1],
)

# Words.

MOST = 12
"""Words of a subtask."""
OPEN, CLOSE = '"subtask":"Please', '."'
"""A subtask begins with a word of courtesy and ends with a full stop."""
_OPEN = FIRST_WORKER + SLOTS
_WORD = _OPEN + 1
_ACCESS = _WORD + len(subtask_wording.vocabulary())
_PART = MOST + 4
"""States of a step: worker, opening, so many words, the access list that must come then, and what comes after."""
_ENDED = 1 + STEPS * _PART


def _word_tokens() -> tuple[str, ...]:
    ordinals = [compact.ordinal(number) for number in range(SLOTS)]
    lists = [f"{CLOSE},{plans.access_text(user, sees)}" for user, sees in accesses()]
    return (START, NEXT, END, *ordinals, OPEN, *(f" {word}" for word in subtask_wording.vocabulary()), *lists)


def _legal_word(state: int, workers: int) -> Sequence[int]:
    if state == 0:
        return (0,)
    if state == _ENDED:
        return (2,)
    step, part = divmod(state - 1, _PART)
    if part == 0:
        return range(FIRST_WORKER, FIRST_WORKER + workers)
    if part == 1:
        return (_OPEN,)
    if part == _PART - 1:
        return (1, 2) if step + 1 < STEPS else (2,)
    words = range(_WORD, _ACCESS) if part < MOST + 2 else ()
    lists = range(_ACCESS, _ACCESS + (1 << step + 1) - 1) if part > 2 else ()
    return (*words, *lists)


def _follow_word(state: int, token: int) -> int:
    step, part = divmod(state - 1, _PART)
    if state and part >= 2 and token >= _ACCESS:
        return 1 + step * _PART + _PART - 1
    if token == 2 or state == _ENDED:
        return _ENDED
    return state + 1


def _encode(plan: Plan) -> list[int]:
    known = subtask_wording.vocabulary()
    tokens = [0]
    for step in plan:
        words = [_WORD + known.index(word) for word in step.text.split()]
        access = _ACCESS + accesses().index((step.user, step.sees))
        tokens += [FIRST_WORKER + step.worker, _OPEN, *words, access, 1]
    return [*tokens[:-1], 2]


def _decode(tokens: Sequence[int]) -> Plan:
    """Return the plan. The words of a step decide its role."""
    steps: list[PlanStep] = []
    state, worker, words = 0, 0, [""]
    for token in tokens:
        if token not in _legal_word(state, SLOTS):
            raise ValueError(f"token {token} has no place in a plan at state {state}")
        state = _follow_word(state, token)
        if token < _OPEN:
            worker, words = token - FIRST_WORKER, []
        elif _WORD <= token < _ACCESS:
            words.append(subtask_wording.vocabulary()[token - _WORD])
        elif token >= _ACCESS:
            text = " ".join(words)
            steps.append(PlanStep(worker, subtask_wording.role_of(text), *accesses()[token - _ACCESS], text))
        if token == 2:
            return tuple(steps)
    raise ValueError("the plan has no end")


WORDS = Form(
    "words",
    _word_tokens(),
    _ENDED + 1,
    1 + STEPS * _PART,
    SLOTS + 1,
    _legal_word,
    _follow_word,
    _encode,
    _decode,
    lambda worker: worker.strengths.split(),
)
FORMS: Mapping[str, Form] = {form.name: form for form in (ROLES, WORDS)}
