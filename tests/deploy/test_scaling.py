"""The guide to scaling: its nginx sends each tenant's host name to that tenant's installation."""

import http.server
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.harness import servers

PAGE: Final = (Path(__file__).resolve().parents[2] / "deploy" / "docs" / "scaling.md").read_text()
MAIN: Final = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
events {{ worker_connections 64; }}
http {{
access_log off;
client_body_temp_path {folder}/body;
proxy_temp_path {folder}/proxy;
fastcgi_temp_path {folder}/fastcgi;
uwsgi_temp_path {folder}/uwsgi;
scgi_temp_path {folder}/scgi;
{guide}
}}
"""
"""What surrounds the guide's block in a distribution's own configuration."""


@contextmanager
def installation(name: str) -> Iterator[int]:
    """A server that answers with its name and the host that it was asked for; yields its port."""

    class Named(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = f"{name} {self.headers['Host']}".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Named) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_the_proxy_sends_each_tenant_to_its_installation(tmp_path: Path) -> None:
    binary = servers.nginx_binary()
    if binary is None:
        pytest.skip("there is no nginx")
    (guide,) = re.findall(r"^```nginx\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    with ExitStack() as stack:
        first, second = (stack.enter_context(installation(name)) for name in ("first", "second"))
        port = servers.free_port()
        for written, real in (("10.0.1.1[01]:8080", first), ("10.0.2.1[01]:8080", second)):
            guide = re.sub(written, f"127.0.0.1:{real}", guide)
        guide = guide.replace("listen 80;", f"listen 127.0.0.1:{port};")
        file = tmp_path / "nginx.conf"
        file.write_text(MAIN.format(folder=tmp_path, guide=guide))
        process = subprocess.Popen(
            [str(binary), "-p", str(tmp_path), "-e", str(tmp_path / "error.log"), "-c", str(file)]
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        transport = stack.enter_context(httpx.HTTPTransport(retries=10))
        client = stack.enter_context(httpx.Client(transport=transport, base_url=f"http://127.0.0.1:{port}"))
        texts = [client.get("/", headers={"Host": host}).text for host in ("acme.baton.example", "other.baton.example")]
    assert texts == ["second acme.baton.example", "first other.baton.example"]
