"""The keys that stand in settings, one or several in each: those that sign, those that verify, and master keys.

Every function raises `ValueError` with the fault and its remedy, which shows none of the keys.
"""

from base64 import b64decode

from pydantic import SecretStr

from app.core.transparency.notes import NoteInvalid, Signer, Verifier
from app.core.transparency.witnesses import Witness, read_witnesses

KMS = "aws-kms:"
"""Begins the name of a master key in AWS's key management service."""
KEY_BYTES = 32
KEY_FAULT = "must be keys of 32 bytes in base64, one a line; make one with `openssl rand -base64 32`"


def witnesses(value: str) -> tuple[Witness, ...]:
    """Return the witnesses of a setting."""
    try:
        return read_witnesses(value)
    except NoteInvalid:
        raise ValueError("must be a URL and a verifier key (NAME+HEX+BASE64) for each witness; correct it") from None


def verifiers(value: str) -> tuple[Verifier, ...]:
    """Return the verifier keys of a setting."""
    try:
        return tuple([Verifier.parse(word) for word in value.split()])
    except NoteInvalid:
        raise ValueError("must be verifier keys (NAME+HEX+BASE64) with spaces between them; correct it") from None


def signers(value: SecretStr | None) -> tuple[Signer, ...]:
    """Return the signer keys of a setting."""
    words = value.get_secret_value().split() if value is not None else []
    try:
        return tuple([Signer.parse(word) for word in words])
    except NoteInvalid:
        raise ValueError("is not a signer key; make one with `baton audit log --new-key NAME`") from None


def master_keys(value: SecretStr | None) -> tuple[bytes | str, ...]:
    """Return the master keys of a setting, and the names of those in KMS."""
    words = value.get_secret_value().split() if value is not None else []
    keys: list[bytes | str] = []
    for word in words:
        if word.startswith(KMS):
            keys.append(word)
        else:
            keys.append(_master_key(word))
    return tuple(keys)


def _master_key(word: str) -> bytes:
    try:
        key = b64decode(word, validate=True)
    except ValueError:
        raise ValueError(KEY_FAULT) from None
    if len(key) != KEY_BYTES:
        raise ValueError(KEY_FAULT)
    return key
