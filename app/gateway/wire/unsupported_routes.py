"""The messages of 404s and 405s: which of OpenAI's and Anthropic's APIs Baton does not offer, and why."""

from collections.abc import Mapping, Sequence
from typing import Final

NOT_OFFERED: Final[Mapping[str, str]] = {
    "audio": "Baton's answers are text: ask a provider of speech directly, and send transcripts here",
    "images": "Baton's answers are text: ask an image provider directly; images to be seen go into the conversation",
    "videos": "Baton's answers are text: ask a video provider directly",
    "realtime": "Baton speaks HTTP and server-sent events: stream /v1/chat/completions or /v1/responses",
    "live": "Baton speaks HTTP and server-sent events: stream /v1/chat/completions or /v1/responses",
    "agents": "Baton keeps no agents: run the loop in your client, with function tools",
    "decisions": "Baton decides nothing but who answers: ask for JSON by a schema",
    "safety": "Baton does not judge content: ask a moderation provider directly",
    "content_provenance_checks": "Baton does not judge content: ask a provider that does",
    "embeddings": "a run has an answer and no vector: ask an embeddings provider directly",
    "moderations": "Baton does not moderate: ask a moderation provider directly",
    "files": "Baton keeps no files: send images, PDFs and texts inline",
    "uploads": "Baton keeps no files: send images, PDFs and texts inline",
    "vector_stores": "Baton keeps no documents: search them by a function tool of your own",
    "containers": "Baton executes no code: execute it by a function tool of your own",
    "batches": "send the requests one by one to /v1/responses, with background: true where they are long",
    "fine_tuning": "Baton serves models: conductors are trained on the command line",
    "evals": "Baton does not evaluate here; GET /v1/runs has what an evaluation reads",
    "graders": "Baton does not evaluate here; GET /v1/runs has what an evaluation reads",
    "assistants": "OpenAI has deprecated it in favour of /v1/responses, which Baton has",
    "threads": "OpenAI has deprecated it in favour of /v1/responses, which Baton has",
    "conversations": "send previous_response_id, or the whole conversation with each request",
    "chatkit": "Baton serves no chat sessions: keep the conversation in your client",
    "organization": "keys are managed on the command line: `baton keys`",
    "projects": "keys are managed on the command line: `baton keys`",
    "engines": "OpenAI has retired it; GET /v1/models lists what there is",
    "edits": "OpenAI has retired it in favour of /v1/chat/completions",
    "skills": "Baton keeps no skills: say what there is to know in the conversation",
}
"""By the first segment behind /v1: OpenAI's families of routes that are no part of Baton."""

BATCHES: Final = "send the requests one by one to /v1/messages"
COMPLETE: Final = "Anthropic has deprecated it in favour of /v1/messages, which Baton has"
NO_COMPLETIONS: Final = "Baton keeps no chat completions:"


VERSION: Final = "v1"


def suggest_path(path: str) -> str:
    """Return a path as it was probably meant: without empty segments, and with one `v1`, at its beginning."""
    segments = [segment for segment in path.split("/") if segment]
    while VERSION in segments[1:]:
        del segments[: segments.index(VERSION, 1)]
    return "/" + "/".join(segments)


def advice(path: str, meant_route: str | None) -> str:
    """Return the message of a 404; nothing of `path` occurs in it. `meant_route` is the route at `suggest_path`, if
    there is one."""
    first, _, rest = path.strip("/").partition("/")
    family, _, rest = rest.partition("/")
    if first == "v1" and family == "messages" and rest.partition("/")[0] == "batches":
        return f"Baton does not offer this API: {BATCHES}."
    if first == "v1" and family == "complete":
        return f"Baton does not offer this API: {COMPLETE}."
    if first == "v1" and family in NOT_OFFERED:
        return f"Baton does not offer this API: {NOT_OFFERED[family]}."
    if first == "v1" and family == "chat" and rest.startswith("completions/"):
        return f"{NO_COMPLETIONS} GET /v1/runs/{{id}} explains the run of one, by the id of either."
    if meant_route is not None:
        return (
            f"There is no such route. Did you mean {meant_route}? A path has no slash at its end, no two slashes in a "
            "row, and nothing before its /v1."
        )
    if first in ("chat", "completions", "models", "responses", "messages", "runs", *NOT_OFFERED):
        return "There is no such route; the API is under /v1: let the client's base URL end with it."
    return "There is no such route; the API is under /v1, and GET /openapi.json describes it."


def other_methods(path: str, methods: Sequence[str]) -> str:
    """Return the message of a 405, for a route that takes `methods`."""
    if path == "/v1/chat/completions":
        return f"{NO_COMPLETIONS} POST makes one, and GET /v1/runs lists their runs."
    main_methods = [method for method in methods if method not in ("HEAD", "OPTIONS")]
    return f"This route does not take that method, only {' and '.join(main_methods)}."
