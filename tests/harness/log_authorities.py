"""A witness as https://c2sp.org/tlog-witness describes it, and an RFC 3161 authority that is `openssl ts`."""

import asyncio
import subprocess
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.core.transparency.merkle import EMPTY_ROOT, node_hash
from app.core.transparency.notes import NoteInvalid, Verifier, open_checkpoint, split_note

NAME = "witness.example/w1"
COSIGNED_AT = 1_790_000_000
TSA = """
[ tsa ]
default_tsa = own
[ own ]
serial = {folder}/serial
crypto_device = builtin
signer_cert = {folder}/tsa.pem
certs = {folder}/tsa.pem
signer_key = {folder}/tsa.key
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256
accuracy = secs:1
"""


def is_consistent(old: int, old_root: bytes, new: int, new_root: bytes, proof: Sequence[bytes]) -> bool:
    """Return True if the proof shows that the tree of the first size and root is the beginning of the second one.

    RFC 9162, 2.1.4.2.
    """
    if not 0 <= old <= new:
        return False
    if old in (0, new):
        return not proof and old_root == (new_root if old == new else EMPTY_ROOT)
    steps = list(proof)
    if old & (old - 1) == 0:
        steps.insert(0, old_root)
    if not steps:
        return False
    place, last = old - 1, new - 1
    while place & 1:
        place, last = place >> 1, last >> 1
    older = newer = steps[0]
    for step in steps[1:]:
        if last == 0:
            return False
        if place & 1 or place == last:
            older, newer = node_hash(step, older), node_hash(step, newer)
            while not place & 1 and place:
                place, last = place >> 1, last >> 1
        else:
            newer = node_hash(newer, step)
        place, last = place >> 1, last >> 1
    return last == 0 and (older, newer) == (old_root, new_root)


@dataclass
class LogAuthorities:
    """The state of both, and the faults that they show."""

    log: Verifier
    folder: Path
    url: str = ""
    size: int = 0
    root: bytes = EMPTY_ROOT
    away: bool = False
    forges: bool = False
    """The witness signs something else."""
    old_sizes: list[int] = field(default_factory=list)
    """The old sizes of the requests."""
    key: Ed25519PrivateKey = field(default_factory=lambda: Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33))))

    @property
    def verifier(self) -> str:
        """The witness's verifier key."""
        body = b"\x04" + self.key.public_key().public_bytes_raw()
        return f"{NAME}+{self._id.hex()}+{b64encode(body).decode()}"

    @property
    def _id(self) -> bytes:
        body = b"\x04" + self.key.public_key().public_bytes_raw()
        return sha256(f"{NAME}\n".encode() + body).digest()[:4]

    async def add_checkpoint(self, request: web.Request) -> web.Response:
        """Cosign a checkpoint that continues the last one."""
        head, _, note = (await request.text()).partition("\n\n")
        first, *proof = head.split("\n")
        old = int(first.removeprefix("old "))
        self.old_sizes.append(old)
        if self.away:
            return web.Response(status=503)
        try:
            found = open_checkpoint(note, [self.log])
        except NoteInvalid:
            return web.Response(status=403)
        if old != self.size:
            return web.Response(status=409, body=f"{self.size}\n".encode(), content_type="text/x.tlog.size")
        hashes = [b64decode(line) for line in proof]
        if old and not is_consistent(old, self.root, found.size, found.root, hashes):
            return web.Response(status=422)
        self.size, self.root = found.size, found.root
        return web.Response(text=self.line(split_note(note)[0]))

    def line(self, text: str) -> str:
        """Return a reply with the cosignature of a checkpoint's text, and one by a key that nobody knows."""
        stated = "forged\n" if self.forges else text
        signature = self.key.sign(f"cosignature/v1\ntime {COSIGNED_AT}\n{stated}".encode())
        signed = self._id + COSIGNED_AT.to_bytes(8, "big") + signature
        unknown = b64encode(bytes(76)).decode()
        return f"\u2014 other.example/w {unknown}\n\u2014 {NAME} {b64encode(signed).decode()}\n"

    async def stamp(self, request: web.Request) -> web.Response:
        """Answer a time-stamp query by `openssl ts -reply`."""
        if self.away or request.content_type != "application/timestamp-query":
            return web.Response(status=503)
        (self.folder / "query.tsq").write_bytes(await request.read())
        await asyncio.to_thread(
            openssl, self.folder, "ts", "-reply", "-config", "tsa.cnf", "-queryfile", "query.tsq", "-out", "reply.tsr"
        )
        body = (self.folder / "reply.tsr").read_bytes()
        return web.Response(body=body, content_type="application/timestamp-reply")


def openssl(folder: Path, *words: str) -> str:
    """Call `openssl` in a folder. Returns what it prints."""
    done = subprocess.run(["openssl", *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def make_authority(folder: Path) -> None:
    """Make key and certificate of a time-stamp authority in a folder."""
    folder.mkdir()
    (folder / "tsa.cnf").write_text(TSA.format(folder=folder))
    (folder / "serial").write_text("01\n")
    key = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=tsa")
    usage = ("-addext", "extendedKeyUsage=critical,timeStamping", "-addext", "keyUsage=critical,digitalSignature")
    openssl(folder, *key, *usage, "-keyout", "tsa.key", "-out", "tsa.pem", "-days", "2")


@asynccontextmanager
async def log_authorities(log: Verifier, folder: Path) -> AsyncIterator[LogAuthorities]:
    """Serve both on a free port for the length of the block. `folder` is the authority's own."""
    served = LogAuthorities(log, folder)
    app = web.Application()
    app.router.add_post("/add-checkpoint", served.add_checkpoint)
    app.router.add_post("/stamp", served.stamp)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        address = runner.addresses[0]
        served.url = f"http://127.0.0.1:{address[1]}"
        yield served
    finally:
        await runner.cleanup()
