"""The archive of pruned runs: files in a folder, or in a bucket of an S3-compatible store.

A file is written under a name that no other file has, and read back before it counts as written. Nothing is ever
replaced or deleted here, but for a checkpoint to which cosignatures are added: how long archives are kept is for the
operator's own rules, such as a bucket's lifecycle.
"""

import os
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from app.errors import ArchiveUnavailable, ConfigInvalid

SCHEME = "s3"
CONTENT_TYPES = {"gz": "application/gzip", "txt": "text/plain", "tsr": "application/timestamp-reply"}
"""The media types of files by the ends of their names."""
CONNECT_SECONDS = 10
READ_SECONDS = 60
"""Longest wait for the next bytes of the store."""
READ_BYTES = 2**16
"""Most bytes of a file that is read; a checkpoint and a time stamp have fewer."""
PART = ".part"
"""The end of the name of a file that is being written."""
LEFT_SECONDS = 3_600.0
"""The age from which such a file is one that a crash has left."""
TRIES = 3
"""Most times that botocore sends one request."""


class ArchiveFiles(Protocol):
    """A place for archived files. Its methods block: call them on a thread."""

    def put(self, name: str, body: bytes) -> str:
        """Write a file, read it back, and return where it is. Raises `ArchiveUnavailable` if it is not there whole."""
        ...

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file, up to 64 KiB; None if there is none. Raises `ArchiveUnavailable`."""
        ...

    def find_write_time(self, name: str) -> float | None:
        """Return when a file was written, in seconds since 1970; None if there is none. Raises `ArchiveUnavailable`."""
        ...

    def names(self, after: str) -> list[str]:
        """Return the names of the files that sort behind `after`, in order. Raises `ArchiveUnavailable`."""
        ...


def open_archive_files(address: str, endpoint: str | None = None) -> ArchiveFiles:
    """Return the place that BATON_ARCHIVE names: a folder, or `s3://bucket/prefix`, with the URL of a store other than
    AWS.

    Raises `ConfigInvalid` for another address, and where the library for S3 is not installed. Nothing is connected.
    """
    if "://" not in address:
        return Folder(Path(address))
    parts = urlsplit(address)
    if parts.scheme != SCHEME or not parts.netloc or "@" in parts.netloc:
        raise ConfigInvalid(["BATON_ARCHIVE: must be a folder or s3://bucket/prefix; correct it"])
    return Bucket(parts.netloc, parts.path.strip("/"), endpoint)


class Folder:
    """A folder, which is made when it is first used. Only its owner can read the files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cleaned: set[Path] = set()
        """The folders in which this process has looked for parts that a crash left."""

    def put(self, name: str, body: bytes) -> str:
        """Implements `ArchiveFiles`. The file and its entry in the folder have reached the disk when it returns."""
        path = self._folder / name
        part = path.with_name(f"{path.name}.{os.urandom(4).hex()}{PART}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            _sync_folder(path.parent)
            self._clean(path.parent, path.stat().st_mtime)
            copy = path.read_bytes()
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise ArchiveUnavailable(f"{path} cannot be written: {error.strerror or type(error).__name__}.") from None
        return _check_copy(str(path), body, copy)

    def _clean(self, folder: Path, now: float) -> None:
        """Delete the parts of files that a crash left in a folder; another process may be writing younger ones."""
        if folder in self._cleaned:
            return
        self._cleaned.add(folder)
        for part in folder.glob(f"*{PART}"):
            with suppress(FileNotFoundError):  # its writer, or another one that cleans, was quicker
                if now - part.stat().st_mtime > LEFT_SECONDS:
                    part.unlink()

    def read(self, name: str) -> bytes | None:
        """Implements `ArchiveFiles`."""
        path = self._folder / name
        try:
            with path.open("rb") as file:
                return file.read(READ_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ArchiveUnavailable(f"{path} cannot be read: {error.strerror or type(error).__name__}.") from None

    def find_write_time(self, name: str) -> float | None:
        """Implements `ArchiveFiles`."""
        path = self._folder / name
        try:
            return path.stat().st_mtime
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ArchiveUnavailable(f"{path} cannot be read: {error.strerror or type(error).__name__}.") from None

    def names(self, after: str) -> list[str]:
        """Implements `ArchiveFiles`."""
        try:
            file_names = [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            words = error.strerror or type(error).__name__
            raise ArchiveUnavailable(f"{self._folder} cannot be read: {words}.") from None
        names = []
        for name in sorted(file_names):
            if name > after and not name.endswith(PART):
                names.append(name)
        return names


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Bucket:
    """A bucket of S3, or of a store with its API. botocore finds credentials and the region where it always does: the
    `AWS_*` variables, profiles, and the roles of instances and pods."""

    def __init__(self, bucket: str, prefix: str, endpoint: str | None) -> None:
        try:
            session, config = import_module("botocore.session"), import_module("botocore.config")
            self._failures = import_module("botocore.exceptions")
        except ImportError:
            raise ConfigInvalid(
                [f"{SCHEME}://{bucket}: needs botocore; install it with `pip install 'baton[s3]'`"]
            ) from None
        self._bucket = bucket
        self._prefix = prefix
        self._session = session.Session()
        self._client: Any = None
        addressing = "path" if endpoint else "auto"
        self._options = {
            "endpoint_url": endpoint,
            "region_name": self._session.get_config_variable("region") or "us-east-1",
            "config": config.Config(
                connect_timeout=CONNECT_SECONDS,
                read_timeout=READ_SECONDS,
                retries={"total_max_attempts": TRIES, "mode": "standard"},
                # Stores other than AWS do not all know the newer checksums, and each file is read back anyway.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": addressing},
            ),
        }

    def put(self, name: str, body: bytes) -> str:
        """Implements `ArchiveFiles`."""
        key = f"{self._prefix}/{name}" if self._prefix else name
        location = f"{SCHEME}://{self._bucket}/{key}"
        try:
            client = self._connect()
            client.put_object(Bucket=self._bucket, Key=key, Body=body, ContentType=_content_type(name))
            copy = client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
        except (self._failures.BotoCoreError, self._failures.ClientError, OSError) as error:
            raise ArchiveUnavailable(f"{location} cannot be written: {_reason(error)}.") from None
        return _check_copy(location, body, copy)

    def read(self, name: str) -> bytes | None:
        """Implements `ArchiveFiles`."""
        key = f"{self._prefix}/{name}" if self._prefix else name
        try:
            body: bytes = self._connect().get_object(Bucket=self._bucket, Key=key)["Body"].read(READ_BYTES)
        except (self._failures.BotoCoreError, self._failures.ClientError, OSError) as error:
            if _reason(error) == "NoSuchKey":
                return None
            raise self._unreadable(error) from None
        return body

    def find_write_time(self, name: str) -> float | None:
        """Implements `ArchiveFiles`."""
        key = f"{self._prefix}/{name}" if self._prefix else name
        try:
            at: float = self._connect().head_object(Bucket=self._bucket, Key=key)["LastModified"].timestamp()
        except (self._failures.BotoCoreError, self._failures.ClientError, OSError) as error:
            if _reason(error) in ("404", "NoSuchKey"):
                return None
            raise self._unreadable(error) from None
        return at

    def names(self, after: str) -> list[str]:
        """Implements `ArchiveFiles`."""
        prefix = f"{self._prefix}/" if self._prefix else ""
        file_names: list[str] = []
        try:
            pages = self._connect().get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=prefix, StartAfter=prefix + after):
                file_names += [entry["Key"].removeprefix(prefix) for entry in page.get("Contents", [])]
        except (self._failures.BotoCoreError, self._failures.ClientError, OSError) as error:
            raise self._unreadable(error) from None
        return file_names

    def _unreadable(self, error: Exception) -> ArchiveUnavailable:
        return ArchiveUnavailable(f"{SCHEME}://{self._bucket}/{self._prefix} cannot be read: {_reason(error)}.")

    def _connect(self) -> Any:
        """Return the client, made on first use: botocore reads files of several megabytes for it."""
        if self._client is None:
            self._client = self._session.create_client("s3", **self._options)
        return self._client


def _content_type(name: str) -> str:
    return CONTENT_TYPES.get(name.rpartition(".")[2], "application/octet-stream")


def _reason(error: Exception) -> str:
    """Return the store's code of a fault, such as NoSuchBucket or AccessDenied, or the kind of the error."""
    answer: Any = getattr(error, "response", None)
    code = answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None
    return str(code or type(error).__name__)


def _check_copy(location: str, body: bytes, copy: bytes) -> str:
    if sha256(body).digest() != sha256(copy).digest():
        raise ArchiveUnavailable(f"{location} does not hold what was written to it.")
    return location
