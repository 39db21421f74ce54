"""A certificate authority of the test's own, with the files that its servers and clients need."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization


@dataclass(frozen=True)
class Authority:
    """A certificate authority that no machine trusts, as files in PEM form."""

    folder: Path
    authority: trustme.CA

    @property
    def ca(self) -> str:
        """The authority's own certificate."""
        return self._write("ca.pem", self.authority.cert_pem)

    def server(self, *, demands_certificate: bool = False) -> ssl.SSLContext:
        """TLS of a server at 127.0.0.1."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert("127.0.0.1").configure_cert(context)
        if demands_certificate:
            context.verify_mode = ssl.CERT_REQUIRED
            self.authority.configure_trust(context)
        return context

    def client(self, name: str = "client", *, one_file: bool = False) -> tuple[str, str]:
        """Return the files of a client's certificate and of its key; the second is empty if the first holds both."""
        leaf = self.authority.issue_cert("baton@example.com")
        if one_file:
            return self._write(f"{name}-and-key.pem", leaf.private_key_and_cert_chain_pem), ""
        certificate = self._write(f"{name}.pem", leaf.cert_chain_pems[0])
        return certificate, self._write(f"{name}.key", leaf.private_key_pem)

    def write_locked_key(self) -> str:
        """Return the file of a key that only a password opens."""
        pem = self.authority.issue_cert("baton@example.com").private_key_pem.bytes()
        encryption = serialization.BestAvailableEncryption(b"password")
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
        locked = serialization.load_pem_private_key(pem, None).private_bytes(*form, encryption)
        return self._write("locked.key", trustme.Blob(locked))

    def _write(self, name: str, pem: trustme.Blob) -> str:
        path = self.folder / name
        pem.write_to_path(str(path))
        return str(path)
