"""`baton webhooks failed|resend` shows messages to the operator's webhook that were given up, and sends them again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.core.run import notices
from app.core.run.notices import FailedNotice
from app.errors import ConfigInvalid, NotFound
from app.process.config import Settings

MAX_FAILED_MESSAGES = 10_000
"""Messages among which `resend` looks."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs on the configured database."""
    settings = storage.read_settings(environ)
    if args.verb == "failed":
        event_loop.run(_list_failed(settings, args))
    else:
        event_loop.run(_resend(settings, args, now()))
    return 0


async def _list_failed(settings: Settings, args: Arguments) -> None:
    async with storage.open_configured_store(settings) as store:
        messages = await store.failed_notices(args.limit)
    if args.json:
        terminal.print_json([_record(message) for message in messages])
        return
    table = terminal.table()
    for column in ("id", "type", "about", "made", "given up", "reason"):
        table.add_column(column, overflow="fold")
    for message in messages:
        terminal.add_row(table, _cells(message))
    terminal.print_table(table, "No message was given up.")


def _record(message: FailedNotice) -> dict[str, Any]:
    notice = message.notice
    return {
        "id": notice.id,
        "type": notices.kind(notice),
        "about": notice.run,
        "created_at": notice.at,
        "tries": notice.tries,
        "failed_at": message.failed_at,
        "reason": message.reason,
    }


def _cells(message: FailedNotice) -> tuple[str, ...]:
    notice = message.notice
    return (
        notice.id,
        notices.kind(notice),
        notice.run,
        terminal.minute(notice.at),
        terminal.minute(message.failed_at),
        message.reason,
    )


async def _resend(settings: Settings, args: Arguments, now: float) -> None:
    if bool(args.ids) == args.all:
        raise ConfigInvalid(["give the ids of messages, or --all"])
    async with storage.open_configured_store(settings) as store:
        messages = _select_messages(await store.failed_notices(MAX_FAILED_MESSAGES), args.ids)
        count = await store.resend_notices([message.notice for message in messages], now)
    if args.json:
        terminal.print_json({"resent": count})
        return
    words = f"{count} messages are due again."
    if count == 1:
        words = "1 message is due again."
    terminal.stdout().print(words)


def _select_messages(messages: Sequence[FailedNotice], ids: Sequence[str]) -> Sequence[FailedNotice]:
    """Return the messages of these ids, or all. Raises `NotFound` for an id that no message has."""
    by_id = {message.notice.id: message for message in messages}
    unknown = sorted(set(ids) - set(by_id))
    if unknown:
        raise NotFound(f"No message with the id {unknown[0]} was given up; `baton webhooks failed` lists them.")
    if ids:
        return [by_id[name] for name in ids]
    return messages
