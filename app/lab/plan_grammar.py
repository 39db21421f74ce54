"""The forms in which a small conductor reads cards and writes plans: each a vocabulary and an exact grammar.

    roles .... a role is one token, whose subtask is always the same; a card's strengths are one token
    words .... a subtask is written word by word, any word after any other, up to `MOST` of them; so are cards

Either way a plan's tokens, joined, are the JSON that `proposals.py` reads. A grammar is a table: from each state the
legal tokens, and to which state each leads. Mask, rollout and loss all go by it.
"""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from app.conductor import compact
from app.lab import plans, subtask_wording
from app.lab.plans import END, FIRST_WORKER, LONGEST, NEXT, SLOTS, START, STEPS, Plan, PlanStep, accesses
from app.lab.world import Profile


class Form(Struct, frozen=True, eq=False):
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

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens stand for."""
        return "".join(self.tokens[token] for token in tokens)


# Roles. A state is a place in the plan: no token changes what may come after the next one.


def _legal_role_tokens(place: int, row: int) -> Sequence[int]:
    if row <= SLOTS:
        return plans.legal(place, row)
    return plans.legal_again(place, row - SLOTS)


def _next_place(place: int, token: int) -> int:
    return min(place + 1, LONGEST - 1)


def _strengths_as_one_token(worker: Profile) -> Sequence[str]:
    return compact.card(worker.strengths.split(), worker.price)[:1]


ROLES = Form(
    name="roles",
    tokens=plans.vocabulary(),
    states=LONGEST,
    longest=LONGEST,
    rows=2 * SLOTS + 1,
    legal=_legal_role_tokens,
    follow=_next_place,
    encode=plans.to_tokens,
    decode=plans.from_tokens,
    strengths=_strengths_as_one_token,
)

# Words.

MOST = 12
"""Words of a subtask."""
OPEN, CLOSE = '"subtask":"Please', '."'
"""A subtask begins with a word of courtesy and ends with a full stop."""
_START_TOKEN, _NEXT_TOKEN, _END_TOKEN = 0, 1, 2
_OPEN_TOKEN = FIRST_WORKER + SLOTS
_FIRST_WORD = _OPEN_TOKEN + 1
_FIRST_ACCESS = _FIRST_WORD + len(subtask_wording.vocabulary())
_STEP_STATES = MOST + 4
"""States of a step: worker, opening, so many words, the access list that must come then, and what comes after."""
_LAST_OF_STEP = _STEP_STATES - 1
_ENDED = 1 + STEPS * _STEP_STATES


def _word_tokens() -> tuple[str, ...]:
    ordinals = [compact.ordinal(number) for number in range(SLOTS)]
    words = [f" {word}" for word in subtask_wording.vocabulary()]
    access_lists = [f"{CLOSE},{plans.access_text(user, sees)}" for user, sees in accesses()]
    return (START, NEXT, END, *ordinals, OPEN, *words, *access_lists)


def _legal_word_tokens(state: int, workers: int) -> Sequence[int]:
    if state == 0:
        return (_START_TOKEN,)
    if state == _ENDED:
        return (_END_TOKEN,)
    step, part = divmod(state - 1, _STEP_STATES)
    if part == 0:
        return range(FIRST_WORKER, FIRST_WORKER + workers)
    if part == 1:
        return (_OPEN_TOKEN,)
    if part == _LAST_OF_STEP:
        if step + 1 < STEPS:
            return (_NEXT_TOKEN, _END_TOKEN)
        return (_END_TOKEN,)
    tokens: list[int] = []
    if part < MOST + 2:
        tokens += range(_FIRST_WORD, _FIRST_ACCESS)
    if part > 2:  # a subtask has one word at least
        lists_of_earlier_steps = (1 << step + 1) - 1
        tokens += range(_FIRST_ACCESS, _FIRST_ACCESS + lists_of_earlier_steps)
    return tuple(tokens)


def _state_after(state: int, token: int) -> int:
    step, part = divmod(state - 1, _STEP_STATES)
    if state and part >= 2 and token >= _FIRST_ACCESS:
        return 1 + step * _STEP_STATES + _LAST_OF_STEP
    if token == _END_TOKEN or state == _ENDED:
        return _ENDED
    return state + 1


def _encode_words(plan: Plan) -> list[int]:
    vocabulary = subtask_wording.vocabulary()
    tokens = [_START_TOKEN]
    for n, step in enumerate(plan):
        if n:
            tokens.append(_NEXT_TOKEN)
        words = [_FIRST_WORD + vocabulary.index(word) for word in step.text.split()]
        access = _FIRST_ACCESS + accesses().index((step.user, step.sees))
        tokens += [FIRST_WORKER + step.worker, _OPEN_TOKEN, *words, access]
    return [*tokens, _END_TOKEN]


def _decode_words(tokens: Sequence[int]) -> Plan:
    """Return the plan. The words of a step decide its role."""
    steps: list[PlanStep] = []
    worker = 0
    words: list[str] = []
    state = 0
    for token in tokens:
        if token not in _legal_word_tokens(state, SLOTS):
            raise ValueError(f"token {token} has no place in a plan at state {state}")
        state = _state_after(state, token)
        if FIRST_WORKER <= token < _OPEN_TOKEN:
            worker, words = token - FIRST_WORKER, []
        elif _FIRST_WORD <= token < _FIRST_ACCESS:
            words.append(subtask_wording.vocabulary()[token - _FIRST_WORD])
        elif token >= _FIRST_ACCESS:
            user, sees = accesses()[token - _FIRST_ACCESS]
            text = " ".join(words)
            steps.append(PlanStep(worker, subtask_wording.role_of(text), user, sees, text))
        elif token == _END_TOKEN:
            return tuple(steps)
    raise ValueError("the plan has no end")


def _strengths_in_words(worker: Profile) -> Sequence[str]:
    return worker.strengths.split()


WORDS = Form(
    name="words",
    tokens=_word_tokens(),
    states=_ENDED + 1,
    longest=1 + STEPS * _STEP_STATES,
    rows=SLOTS + 1,
    legal=_legal_word_tokens,
    follow=_state_after,
    encode=_encode_words,
    decode=_decode_words,
    strengths=_strengths_in_words,
)
FORMS: Mapping[str, Form] = {form.name: form for form in (ROLES, WORDS)}
