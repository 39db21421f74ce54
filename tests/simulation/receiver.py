"""The operator's receiver of webhooks: it checks each signature by itself, and refuses, hangs or answers in vain."""

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
from msgspec import Struct

from app.core.run.notices import APPROVAL_REQUESTED
from tests.simulation.loop import EPOCH
from tests.simulation.seam import Seam
from tests.simulation.witness import Witness

SECRET = bytes(range(32))
URL = "https://receiver.invalid/baton"
HANGS = 15.0
"""Seconds for which the receiver hangs: as long as whoever delivers waits."""
DRIFT = 400.0
"""Seconds by which a sender's clock may be wrong in any world."""


class Delivery(Struct, frozen=True):
    """One that came in, with its true signature. `taken`: the receiver has kept it, whether or not its sender knows."""

    id: str
    kind: str
    about: str
    """The response's id, or the digest of a plan that waits for an approval."""
    at: float
    is_accepted: bool


@dataclass
class Receiver:
    """All deliveries of a world."""

    witness: Witness
    deliveries: list[Delivery] = field(default_factory=list)
    bodies: dict[str, bytes] = field(default_factory=dict)

    def take(self, seam: Seam, body: bytes, headers: Mapping[str, str], is_taken: bool) -> None:
        """Something has come; what is not signed as the specification wants is a forgery."""
        name, stamp = headers["webhook-id"], headers["webhook-timestamp"]
        digest = hmac.new(SECRET, f"{name}.{stamp}.".encode() + body, hashlib.sha256).digest()
        if f"v1,{base64.b64encode(digest).decode()}" not in headers["webhook-signature"].split(" "):
            self.witness.object(f"{seam.name} sent {name} with a wrong signature")
        if abs(int(stamp) - EPOCH - seam.time()) > DRIFT:
            self.witness.object(f"{seam.name} signed {name} for another time")
        if self.bodies.setdefault(name, body) != body:
            self.witness.object(f"{name} says something else than before")
        event = json.loads(body)
        self.witness.note(seam.name, "webhook", name, event["type"], is_taken)
        about = event["data"]["digest" if event["type"] == APPROVAL_REQUESTED else "id"]
        self.deliveries.append(Delivery(name, event["type"], about, seam.time(), is_taken))


@dataclass
class Sender(httpx.AsyncBaseTransport):
    """The network between one process and the receiver, as the transport of the process's HTTP client."""

    receiver: Receiver
    seam: Seam

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One request, and its reply if it has one."""
        seam = self.seam
        if request.url != URL:
            self.receiver.witness.object(f"{seam.name} posted to {request.url}")
        await seam.strike("webhook.sent")
        await seam.lag(0.01)
        if seam.hit("receiver.hangs"):
            await asyncio.sleep(HANGS)
            raise httpx.ReadTimeout("the receiver hangs")
        status, headers = 200, dict[str, str]()
        if seam.hit("receiver.refuses"):
            status = 503
        elif seam.hit("receiver.asks_to_wait"):
            status, headers = 429, {"retry-after": "3"}
        self.receiver.take(seam, request.content, request.headers, status == 200)
        await seam.strike("webhook.received")
        if seam.hit("receiver.reply_lost"):
            raise httpx.ReadError("the reply was lost")
        await seam.lag(0.01)
        return httpx.Response(status, headers=headers)
