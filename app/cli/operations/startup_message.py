"""The announcement of a started process: its address, its pool, and a request that can be pasted."""

import json
from collections.abc import Mapping

from app.process.serve import Announcement

QUESTION = "Anna has 12 apples. She buys 7 more and gives 4 to Ben. How many apples does she have now?"
"""A question that the mini tier of the rehearsal pool always answers correctly: 15."""
ROLE_TEXTS: Mapping[str, str] = {
    "serve": "gateway and engine in one process",
    "gateway": "gateway; engines carry out the runs",
    "dispatcher": "engine",
}
REHEARSAL = (
    "REHEARSAL: answers come from simulated workers, not from language models. For real ones set a provider key\n"
    "such as OPENAI_API_KEY or ANTHROPIC_API_KEY, or a pool file with BATON_POOL, and start again."
)
CURL = """\
  curl -s {url}/v1/chat/completions \\
    -H "Authorization: Bearer {key}" -H "Content-Type: application/json" \\
    -d '{body}'"""
PYTHON = """\
  {imports}
  client = OpenAI(base_url="{url}/v1", api_key={key})
  question = [{{"role": "user", "content": "{question}"}}]
  print(client.chat.completions.create(model="baton-ultra", messages=question).choices[0].message.content)"""


def announcement_text(verb: str, announcement: Announcement, program: str) -> str:
    """Return the announcement. `program` is the command by which the program can be called from here."""
    where = "is ready to take runs"
    if announcement.url:
        where = f"is listening on {announcement.url}"
    head = [f"\nBaton {where}  ({ROLE_TEXTS[verb]})", f"Pool: {announcement.origin}"]
    if announcement.admin is not None:
        head.append(f"Administration: {announcement.admin}/console  (its API: {announcement.admin}/docs)")
    if announcement.rehearsal:
        head.append(REHEARSAL)
    if announcement.url is None:
        return "\n".join(head)
    return "\n\n".join(
        ["\n".join(head), *_key(announcement.key), *_requests(announcement.url, announcement.key), _after(program)]
    )


def announcement_json(verb: str, announcement: Announcement) -> str:
    """Return the announcement as one line of JSON. `key` is a key that was made now, or null."""
    record = {
        "process": verb,
        "url": announcement.url,
        "pool": announcement.origin,
        "rehearsal": announcement.rehearsal,
        "key": announcement.key,
        "admin": announcement.admin,
    }
    return json.dumps(record)


def _key(key: str | None) -> list[str]:
    if key is None:
        return []
    return [f"API key, made now and shown only this once:\n\n  export BATON_API_KEY={key}"]


def _requests(url: str, key: str | None) -> list[str]:
    body = json.dumps({"model": "baton-mini", "messages": [{"role": "user", "content": QUESTION}]})
    imports, key_code = "import os; from openai import OpenAI", 'os.environ["BATON_API_KEY"]'
    if key:
        imports, key_code = "from openai import OpenAI", f'"{key}"'
    return [
        "Ask something:\n\n" + CURL.format(url=url, key=key or "$BATON_API_KEY", body=body),
        "Or in Python, by the official client (pip install openai):\n\n"
        + PYTHON.format(imports=imports, url=url, key=key_code, question=QUESTION),
        f"Or in a browser: {url}/console/playground, where you sign in with a key.",
    ]


def _after(program: str) -> str:
    show, explain = f"`{program} runs show last`", f"`{program} runs explain last`"
    return f"Then {show} shows what was done, and {explain} says why. Ctrl-C stops.\n"
