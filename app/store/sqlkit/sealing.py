"""Encryption of contents at rest, with a key for each tenant.

Master keys come from the operator (`BATON_CONTENT_KEYS`) and are never stored. Each tenant has a random content key,
which is stored encrypted under the first master key (`content_keys`); a content is encrypted under its tenant's content
key by AES-256-GCM, together with the place where it is stored, so that no content can be put in another one's place.
To change the master key only the content keys are encrypted anew, and to destroy a tenant's content key erases all that
was encrypted under it.

A sealed content begins with a byte that no UTF-8 has, so that it differs from a plain one: contents that were stored
without a key stay readable.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from app.errors import ContentKeyUnavailable
from app.store.sqlkit.aws_kms import AwsKms

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAGIC: Final = b"\xffbaton-1"
ID_BYTES, NONCE_BYTES, KEY_BYTES = 8, 12, 32
HEADER_BYTES: Final = len(MAGIC) + ID_BYTES
NO_KEYS = "content is encrypted; set BATON_CONTENT_KEYS to the master keys under which its tenants' keys are stored"


TEXT: Final = "text"
"""The place of all shared texts: which content has them is for its hash to say."""
Decrypt = Callable[[str, bytes], bytes | None]
"""See `Keyring.open`."""


def plain(_place: str, body: bytes) -> bytes | None:
    """Return the content of a store in which nothing is encrypted."""
    return body


MasterKey = bytes | str
"""A master key of 32 bytes; or the name of one in a key management service (`aws_kms.py`)."""


class UnknownKeys(Exception):
    """A content needs content keys that this process has not loaded yet."""

    def __init__(self, ids: Collection[str]) -> None:
        self.ids = frozenset(ids)
        super().__init__(", ".join(sorted(self.ids)))


class StoredKey(Struct, frozen=True):
    """A content key as it is stored."""

    id: str
    tenant: str
    made_at: float
    master: str
    """The mark of the master key under which it is encrypted."""
    wrapped: bytes
    retired_at: float | None = None
    """When it was taken out of use for new contents; None while it is in use."""


class Cipher:
    """AES-256-GCM with a random nonce, which stands before the encrypted bytes. Its library is imported with the first
    one, because most processes need none."""

    def __init__(self, key: bytes) -> None:
        self._aes: AESGCM = resolve_name("cryptography.hazmat.primitives.ciphers.aead:AESGCM")(key)
        self._altered: type[Exception] = resolve_name("cryptography.exceptions:InvalidTag")

    def encrypt(self, body: bytes, bound_to: str) -> bytes:
        """Return the bytes encrypted, so that they are decrypted only together with these words."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._aes.encrypt(nonce, body, bound_to.encode())

    def decrypt(self, sealed: bytes, bound_to: str) -> bytes | None:
        """Return the bytes; None if they were altered, or are bound to other words."""
        try:
            return self._aes.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], bound_to.encode())
        except self._altered:
            return None


class ContentKey:
    """A content key that encrypts."""

    def __init__(self, name: str, key: bytes) -> None:
        self.id = name
        self._cipher = Cipher(key)

    def seal(self, place: str, body: bytes) -> bytes:
        """Return the content encrypted for the place where it is stored."""
        return MAGIC + bytes.fromhex(self.id) + self._cipher.encrypt(body, place)

    def open(self, place: str, sealed: bytes) -> bytes | None:
        """Return the content; None if it was altered or belongs to another place."""
        return self._cipher.decrypt(sealed[HEADER_BYTES:], place)


class Keyring:
    """The master keys of a process, and the content keys that it has loaded.

    `make`, `load` and `rewrap` block where a key management service is asked.
    """

    def __init__(self, masters: Sequence[MasterKey] = ()) -> None:
        """The first of the `masters` encrypts; the others are still accepted."""
        self._masters = {_mark(master): _cipher(master) for master in masters}
        self.present = next(iter(self._masters), "")
        """The mark of the master key that encrypts; empty if there is none, and contents are stored plain."""
        self._loaded: dict[str, ContentKey | None] = {}
        """Content keys by id; None for those that were destroyed."""

    def make(self, tenant: str, now: float) -> StoredKey:
        """Return a new content key for a tenant."""
        name, key = os.urandom(ID_BYTES).hex(), os.urandom(KEY_BYTES)
        self._loaded[name] = ContentKey(name, key)
        return StoredKey(name, tenant, now, self.present, self._wrap(name, tenant, key))

    def load(self, rows: Iterable[StoredKey], ids: Collection[str] = ()) -> None:
        """Take content keys into use. Those of the `ids` that have no row were destroyed.

        Raises `ContentKeyUnavailable` for a key whose master key is not there.
        """
        for row in rows:
            if self._loaded.get(row.id) is None:
                self._loaded[row.id] = ContentKey(row.id, self._unwrap(row))
        for name in ids:
            self._loaded.setdefault(name, None)

    def rewrap(self, row: StoredKey) -> StoredKey:
        """Return the content key encrypted under the present master key. Raises `ContentKeyUnavailable`."""
        wrapped = self._wrap(row.id, row.tenant, self._unwrap(row))
        return StoredKey(row.id, row.tenant, row.made_at, self.present, wrapped, row.retired_at)

    def key(self, name: str) -> ContentKey | None:
        """Return a content key that was loaded; None if it was destroyed. Raises `UnknownKeys`."""
        if name not in self._loaded:
            raise UnknownKeys([name])
        return self._loaded[name]

    def forget(self, names: Collection[str]) -> None:
        """Forget content keys that were destroyed."""
        for name in names:
            self._loaded[name] = None

    def open(self, place: str, body: bytes) -> bytes | None:
        """Return the content that is stored at a place, sealed or plain; None if its key was destroyed or it was
        altered.

        Raises `UnknownKeys`.
        """
        if not body.startswith(MAGIC):
            return body
        key = self.key(bytes(body[len(MAGIC) : len(MAGIC) + ID_BYTES]).hex())
        if key is None:
            return None
        return key.open(place, bytes(body))

    def _wrap(self, name: str, tenant: str, key: bytes) -> bytes:
        return self._masters[self.present].encrypt(key, f"{name} {tenant}")

    def _unwrap(self, row: StoredKey) -> bytes:
        master = self._masters.get(row.master)
        if master is None and not self._masters:
            raise ContentKeyUnavailable(f"The {NO_KEYS}.")
        if master is None:
            raise ContentKeyUnavailable(
                f"The content of the tenant {row.tenant} is encrypted under a master key ({row.master}) that is not in "
                "BATON_CONTENT_KEYS; add it behind the present one."
            )
        key = master.decrypt(bytes(row.wrapped), f"{row.id} {row.tenant}")
        if key is None:
            raise ContentKeyUnavailable(
                f"The content key {row.id} of the tenant {row.tenant} is damaged; restore its row of the table "
                "content_keys from a back-up."
            )
        return key


def place_of(run: str, ref: str) -> str:
    """Return the place of a content of a run, or of the part of it that is its own."""
    return f"{run} {ref}"


def _cipher(master: MasterKey) -> Cipher | AwsKms:
    if isinstance(master, str):
        return AwsKms(master)
    return Cipher(master)


def _mark(master: MasterKey) -> str:
    """Return a short name of a master key, from which it cannot be found."""
    if isinstance(master, str):
        return master
    return hashlib.blake2b(master, digest_size=6, person=b"baton master").hexdigest()
