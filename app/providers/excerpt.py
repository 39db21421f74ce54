"""The redaction of a provider's error message, so that its beginning can be journaled.

Providers quote the request in their errors, and sometimes the key. The rule errs on the side of removing too much:

* a key, anything that looks like one, and every long token are removed;
* a word that occurs in the request is removed, unless it is one of `ORDINARY`: the names of parameters and the few
  hundred English words of which providers make their messages; words that were cut off or joined are found as well;
* four words in a row that occur in the request are removed, even if each of them is ordinary.

What is removed is shown as `[...]`. The model's own name is kept, because it comes from the pool file.
"""

import re
from collections.abc import Container, Iterable, Iterator

import orjson

EXCERPT_CHARS = 500
"""Characters that are kept of a message."""
READ_CHARS = 1_000
"""Characters of a message that are looked at."""
SEARCHED_BYTES = 1 << 19
"""Bytes of a request that are searched. Of the error of a larger one only ordinary words are kept."""
REMOVED = "[...]"
SHORTEST_SECRET = 6
"""Characters of the shortest part of a key that is looked for."""
ROW = 4
"""Words in a row that are taken for a quotation."""
_WORD = re.compile(r"[^\W_]+(?:_[^\W_]+)*")
_KEY = re.compile(r"\S*(?:\*{2,}|\b(?:sk|pk|rk|bt|xai|gsk|hf|ghp|key)[-_][A-Za-z0-9]|AIza|ya29\.)\S*")
_LONG = re.compile(r"[A-Za-z0-9+/=_.\-]{20,}")
_JOINED = re.compile(r"(?:\w[\w-]*-)?\[\.\.\.\](?:-[\w-]*)?")
_GAPS = re.compile(r"\[\.\.\.\](?:[^\w\[]*\[\.\.\.\])+")
_BLANKS = re.compile(r"[\s\x00-\x1f\x7f]+")
"""Blanks and control characters."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/\-]{0,127}", re.ASCII)

_ORDINARY = """
    a about above access account active after again all allowed already also an and another any api are array as at
    authentication available balance be been before below between billing body but by can cannot capacity check code
    completion completions connection contact content context could count credentials credit credits current currently
    data day deployment details did disabled do does doesn don documentation doc docs during each either empty enabled
    endpoint engine error errors exceed exceeded exceeds exist exists expected expired failed false feature few field
    fields filter first following for format found from function functions generate generation generated global given
    greater had has have header high history hour id if image images in inactive incorrect increase input inputs instead
    insufficient integer internal invalid is issue it its json key know least length less limit limited limits list
    load long loaded lower malformed match max maximum may media message messages method minute missing model models
    more most must name needs network new no non not null number object occurred of on one only or org organization
    other our output outputs over overloaded parameter parameters parse parts payment per permission permissions please
    plan policy positive present processing project prompt property provide provided provider proxy quota rate reached
    read received reduce reference refused region rejected remove request requested requests required requires resource
    response retry role roles safety schema seconds see sent server service should shorten size some something
    specified still stream streaming string support supported system temporarily temporary than that the their then
    there these they this tier time timed timeout to token tokens too tool tools try true type unable unauthorized
    unavailable unexpected unknown unsupported up upgrade upstream url usage use used user using valid value values
    version violated violation visit wait was we were when which while will window wish with within wrong you your
    assistant developer error_code frequency_penalty http https input_tokens invalid_request_error logit_bias logprobs
    max_completion_tokens max_output_tokens max_tokens output_tokens parallel_tool_calls presence_penalty
    response_format seed stop stop_sequences temperature tool_choice tool_use tool_result tool_calls top_k top_logprobs
    top_p thinking reasoning reasoning_effort
"""
ORDINARY = frozenset(_ORDINARY.split())
"""Words that say nothing of a request, even where it contains them."""


def excerpt(message: str, body: bytes, secrets: Iterable[str], path: str = "") -> str:
    """Return at most `EXCERPT_CHARS` characters of `message`, in which nothing of the request `body` and none of the
    `secrets` occurs. `path` is that of the request's address, in which some formats have the model."""
    text = message[:READ_CHARS]
    for secret in _parts(secrets):
        text = text.replace(secret, REMOVED)
    model = _model(body)
    text = _KEY.sub(REMOVED, text)
    text = _LONG.sub(lambda match: _long_token(match[0], model, path), text)
    if model:
        body = body.replace(model.encode(), b"")
    text = _without_request(text, body, _names(model) | _names(path))
    text = _JOINED.sub(REMOVED, text)
    text = _GAPS.sub(REMOVED, text)
    text = _BLANKS.sub(" ", text).strip()
    if len(text) <= EXCERPT_CHARS:
        return text
    return text[: EXCERPT_CHARS - 4] + " ..."


def label(value: str, body: bytes, secrets: Iterable[str], allowed: Container[str] = ()) -> str:
    """Return a provider's code or id if it is one of `allowed`, or a short name that has nothing of the request or of
    the `secrets` in it; else an empty string."""
    if value in allowed:
        return value
    if not _ID.fullmatch(value) or _KEY.search(value):
        return ""
    if any(part in value for part in _parts(secrets)) or value.encode() in body:
        return ""
    return value


def _parts(secrets: Iterable[str]) -> list[str]:
    """Return the secrets and their parts between blanks, the longest first: `Bearer KEY` is one, and `KEY` another."""
    parts: set[str] = set()
    for secret in secrets:
        parts.update((secret, *secret.split()))
    return sorted((part for part in parts if len(part) >= SHORTEST_SECRET), key=len, reverse=True)


def _model(body: bytes) -> str:
    """Return the model's name in a request, where it is in the body."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    if isinstance(document, dict) and isinstance(document.get("model"), str):
        model: str = document["model"]
        return model
    return ""


def _long_token(token: str, model: str, path: str) -> str:
    """Return a long token if it is the model's name or has only lower-case letters, and `REMOVED` for any other."""
    bare = token.strip(".-")
    is_model = bool(bare) and bare in (model, *path.replace(":", "/").split("/"))
    is_word = token.islower() and not any(letter.isdigit() for letter in token)
    if is_model or is_word:
        return token
    return REMOVED


def _names(text: str) -> frozenset[str]:
    return frozenset(match[0].casefold() for match in _WORD.finditer(text))


def _without_request(text: str, body: bytes, names: frozenset[str]) -> str:
    """Return the text without what occurs in the body of the request; `names` may stay."""
    words = list(_WORD.finditer(text))
    searched = None
    if len(body) <= SEARCHED_BYTES:
        searched = body.decode("utf-8", "replace").casefold()
    removed: set[int] = set()
    for place, word in enumerate(words):
        if _occurs(word[0].casefold(), searched, names):
            removed.add(place)
    if searched is not None:
        removed |= set(_find_quoted(text.casefold(), words, searched))
    pieces: list[str] = []
    end = 0
    for place in sorted(removed):
        pieces += [text[end : words[place].start()], REMOVED]
        end = words[place].end()
    return "".join((*pieces, text[end:]))


def _occurs(word: str, searched: str | None, names: frozenset[str]) -> bool:
    """Return True if a word occurs in the request, or may occur because the request was not searched (None). Other
    scripts have no blanks between their words, so there a single letter is enough."""
    is_one_letter = len(word) == 1 and word.isascii()
    if word in ORDINARY or word in names or is_one_letter:
        return False
    if searched is None:
        return True
    return word in searched or any(letter in searched for letter in word if not letter.isascii())


def _find_quoted(text: str, words: list[re.Match[str]], searched: str) -> Iterator[int]:
    """Yield the places of the words that stand in a row that occurs in the request."""
    for first in range(len(words) - ROW + 1):
        if text[words[first].start() : words[first + ROW - 1].end()] in searched:
            yield from range(first, first + ROW)
