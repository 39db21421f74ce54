"""Secrets of the environment, each of which may stand in a file instead.

`NAME_FILE` is the path of a file that holds the secret `NAME`, as Docker and Kubernetes mount secrets. The files of
provider keys, of the pepper and of the webhook's secret are read again when the pool file is.
"""

from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

SUFFIX = "_FILE"
MAX_BYTES = 64 << 10
"""Most bytes of such a file; a larger one is taken for a wrong path."""


def secret(environ: Mapping[str, str], name: str) -> str:
    """Return the secret of a variable or of its file, without the file's last line breaks; empty if neither is set.

    Raises ValueError with the fault as a sentence and its remedy. It shows neither the secret nor the path, which might
    be a secret by mistake.
    """
    value, path = environ.get(name, ""), environ.get(name + SUFFIX, "").strip()
    if not path:
        return value if value.strip() else ""
    if value.strip():
        raise ValueError(f"{name}{SUFFIX} is set as well as {name}; unset one of them")
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode().rstrip("\r\n")
    except OSError as error:
        words = error.strerror or type(error).__name__
        raise ValueError(f"{name}{SUFFIX} cannot be read: {words}; correct the path or the permissions") from None
    except UnicodeDecodeError:
        raise ValueError(f"{name}{SUFFIX} names a file that is not UTF-8; correct the path or the file") from None
    if not text.strip() or len(data) > MAX_BYTES:
        fault = "is empty"
        if text.strip():
            fault = f"is larger than {MAX_BYTES >> 10} KiB"
        raise ValueError(f"{name}{SUFFIX} names a file that {fault}; correct the path or the file")
    return text


def secret_text(secret: SecretStr | None) -> str | None:
    """Return the text of a secret; None where there is none."""
    if secret is None:
        return None
    return secret.get_secret_value()
