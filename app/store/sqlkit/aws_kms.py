"""A master key of contents that never leaves AWS's key management service (KMS). Needs the extra `kms`."""

from importlib import import_module
from typing import Any, Final

from app.errors import ConfigInvalid, ContentKeyUnavailable

SCHEME: Final = "aws-kms:"
"""Stands before the key's id, alias or ARN."""
CONNECT_SECONDS, READ_SECONDS = 2, 3
TRIES = 2
"""Most times that botocore sends one request."""


class AwsKms:
    """One key of KMS. botocore finds credentials and the region where it always does. Its methods block: call them on a
    thread."""

    def __init__(self, name: str) -> None:
        """`name` is the key's id, alias or ARN, behind `aws-kms:`."""
        self._key = name.removeprefix(SCHEME)
        try:
            session, config = import_module("botocore.session"), import_module("botocore.config")
            self._failures = import_module("botocore.exceptions")
        except ImportError:
            raise ConfigInvalid(
                ["BATON_CONTENT_KEYS: a key of AWS KMS needs botocore; install it with `pip install 'baton[kms]'`"]
            ) from None
        self._session = session.Session()
        self._config = config.Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            retries={"total_max_attempts": TRIES, "mode": "standard"},
        )
        self._client: Any = None

    def encrypt(self, body: bytes, bound_to: str) -> bytes:
        """Return the bytes encrypted by the service, together with these words as its encryption context."""
        answer = self._ask("encrypt", Plaintext=body, EncryptionContext={"baton": bound_to})
        return bytes(answer["CiphertextBlob"])

    def decrypt(self, sealed: bytes, bound_to: str) -> bytes | None:
        """Return the bytes; None if the service says that they are no ciphertext of its key with these words."""
        try:
            answer = self._ask("decrypt", CiphertextBlob=sealed, EncryptionContext={"baton": bound_to})
        except self._failures.ClientError:
            return None
        return bytes(answer["Plaintext"])

    def _ask(self, verb: str, **fields: Any) -> Any:
        """Return the service's answer. Raises `ContentKeyUnavailable`, and the library's `ClientError` for a wrong
        ciphertext."""
        try:
            if self._client is None:
                region = self._session.get_config_variable("region") or "us-east-1"
                self._client = self._session.create_client("kms", region_name=region, config=self._config)
            return getattr(self._client, verb)(KeyId=self._key, **fields)
        except self._failures.ClientError as error:
            code = error.response.get("Error", {}).get("Code")
            if code == "InvalidCiphertextException":
                raise
            raise ContentKeyUnavailable(f"The key {self._key} of AWS KMS cannot be used: {code}.") from None
        except (self._failures.BotoCoreError, OSError) as error:
            raise ContentKeyUnavailable(
                f"The key {self._key} of AWS KMS cannot be used: {type(error).__name__}."
            ) from None
