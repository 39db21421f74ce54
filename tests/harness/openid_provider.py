"""An OpenID provider in a process of its own: `oidc-provider-mock`, which Authlib's server side makes, with PKCE.

`python -m tests.harness.openid_provider` prints its port. The provider asks nobody for a password: who sends the form
of its page is the person that they name. The code verifier is compared by Authlib's own implementation of RFC 7636.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from wsgiref.simple_server import make_server

PEOPLE = {
    "ann": {"groups": ["staff", "owners"], "email": "ann@example.com", "email_verified": True},
    "ben": {"groups": ["staff"], "email": "ben@example.com", "email_verified": False},
}
"""Claims of the people that the provider knows, by subject."""


@contextmanager
def openid_provider() -> Iterator[str]:
    """Run the provider; yield its issuer URL."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.harness.openid_provider"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def _serve(oauth2: Any, provider: Any, challenge: Any, user: Any) -> None:
    """Serve until the process is ended. The arguments are what `main` imports: only this process needs it."""
    recorded: dict[str, str] = {}

    class Challenge(challenge):  # type: ignore[misc]
        def get_authorization_code_challenge(self, code: Any) -> str | None:
            return recorded.get(code.code)

        def get_authorization_code_challenge_method(self, code: Any) -> str:
            return "S256"

    class Server(oauth2.AuthorizationServer):  # type: ignore[misc]
        def register_grant(self, grant: Any, extensions: Any = None) -> None:
            more = [Challenge(required=True)] if grant is provider.AuthorizationCodeGrant else []
            super().register_grant(grant, [*(extensions or ()), *more])

    plain = provider.AuthorizationCodeGrant.save_authorization_code

    def save(grant: Any, code: str, request: Any) -> None:
        recorded[code] = request.payload.data["code_challenge"]
        plain(grant, code, request)

    provider.AuthorizationCodeGrant.save_authorization_code = save
    oauth2.AuthorizationServer = Server
    people = [user(sub=name, claims=claims) for name, claims in PEOPLE.items()]
    app = provider.app(require_client_registration=True, require_nonce=True, user_claims=people)
    with make_server("127.0.0.1", 0, app) as server:
        print(server.server_port, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    from authlib.integrations import flask_oauth2
    from authlib.oauth2.rfc7636 import CodeChallenge
    from oidc_provider_mock import User, _app

    _serve(flask_oauth2, _app, CodeChallenge, User)
