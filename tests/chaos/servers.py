"""What chaos breaks beside Postgres: the two brokers behind one interface, and a PgBouncer. Knows no job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self

from kombu import Connection, Message
from kombu.exceptions import OperationalError
from sqlalchemy import make_url
from workers import wait_for

from vkjobs import local

QUEUES = ("vkjobs", "vkjobs.tick", "lonely", "twice", "celery")
_RABBITMQ = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin"))


class Broker(Protocol):
    """A broker that can be broken."""

    @property
    def url(self) -> str:
        """Its URL; it stays the same over stop and start."""

    def start(self) -> None:
        """Start, or start anew; what was in it is gone."""

    def kill(self) -> None:
        """End it at once for those who use it."""

    def flush(self) -> None:
        """Throw all messages away."""


class Redis(local.Redis):
    """A Redis of one's own."""

    name = "redis"

    def flush(self) -> None:
        """Throw all there is away."""
        with Connection(self.url) as connection:
            connection.default_channel.client.flushall()


class _Program:
    """A program in a folder of its own, gone with its process at the end of the ``with`` block."""

    log: Path

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="vkjobs-chaos-", dir="/tmp"))
        self.log = self.folder / "log"
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        raise NotImplementedError

    def _launch(self, command: list[str], **options: Any) -> None:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, **options,
            )  # fmt: skip
        self._processes.append(process)

    def _end(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()


class RabbitMQ(_Program):
    """A RabbitMQ node of one's own, from Debian's package, with its own epmd.

    Its death and start are those of the application in the node, as ``rabbitmqctl stop_app`` does it: every connection
    ends, and the messages, which are transient, are gone.
    """

    name = "rabbitmq"

    @staticmethod
    def is_installed() -> bool:
        """Tell whether this machine has it."""
        return bool(_RABBITMQ)

    @property
    def url(self) -> str:
        """URL of its default virtual host."""
        return f"amqp://guest:guest@127.0.0.1:{self._port}//"

    def start(self) -> None:
        """Start the node, or the application in it."""
        if self._processes:
            self.control("start_app")
            return
        self._port, distribution, epmd = (free_port() for _ in range(3))
        nothing = str(self.folder / "nothing")
        self._environment = {
            "PATH": os.defpath,
            "HOME": str(self.folder),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(epmd),
            "RABBITMQ_NODENAME": f"chaos{self._port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self._port),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": nothing,
            "RABBITMQ_ADVANCED_CONFIG_FILE": nothing,
            "RABBITMQ_ENABLED_PLUGINS_FILE": nothing,
            "RABBITMQ_CONF_ENV_FILE": nothing,
            "RUNNING_UNDER_SYSTEMD": "1",  # the node takes the place of its shell script
        }
        self._launch(["epmd"], env=self._environment)
        self._launch([str(_RABBITMQ[-1] / "rabbitmq-server")], env=self._environment)
        wait_for(lambda: "Server startup complete" in self.log.read_text(errors="replace"), "RabbitMQ to start")

    def kill(self) -> None:
        """End the application in the node."""
        self.control("stop_app")

    def flush(self) -> None:
        """Purge its queues."""
        for name in QUEUES:
            with Connection(self.url) as connection, suppress(OperationalError, *connection.channel_errors):
                connection.default_channel.queue_purge(name)

    def control(self, *what: str) -> str:
        """Tell the node something by ``rabbitmqctl``; return its answer."""
        command = [str(_RABBITMQ[-1] / "rabbitmqctl"), "-q", *what]
        return subprocess.run(command, env=self._environment, check=True, capture_output=True, text=True).stdout


class PgBouncer(_Program):
    """A PgBouncer in transaction mode before a database, with a pool of ``size`` connections."""

    def __init__(self, url: str, size: int, *, tls: bool = False) -> None:
        self._behind = make_url(url)
        self._size = size
        self._tls = tls

    @staticmethod
    def is_installed() -> bool:
        """Tell whether this machine has it."""
        return shutil.which("pgbouncer", path=f"{os.defpath}:/usr/sbin") is not None

    @property
    def url(self) -> str:
        """URL of the database through it."""
        mode = "require" if self._tls else "disable"
        return f"postgresql://postgres@127.0.0.1:{self._port}/{self._behind.database}?sslmode={mode}"

    def start(self) -> None:
        """Start it."""
        self._port = free_port()
        identity = {"user": "nobody"} if os.geteuid() == 0 else {}
        shutil.chown(self.folder, **identity) if identity else None
        if self._tls:
            self._certify(identity)
        host, database = self._behind.query["host"], self._behind.database
        (self.folder / "users").write_text('"postgres" ""\n')
        (self.folder / "ini").write_text(
            f"""
            [databases]
            {database} = host={host} port=5432 dbname={database} user=postgres
            [pgbouncer]
            listen_addr = 127.0.0.1
            listen_port = {self._port}
            unix_socket_dir =
            auth_type = trust
            auth_file = {self.folder}/users
            pool_mode = transaction
            default_pool_size = {self._size}
            max_client_conn = 200
            ignore_startup_parameters = extra_float_digits
            client_tls_sslmode = {"require" if self._tls else "disable"}
            client_tls_key_file = {self.folder}/key
            client_tls_cert_file = {self.folder}/certificate
            """.replace("            ", "")
        )
        program = shutil.which("pgbouncer", path=f"{os.defpath}:/usr/sbin")
        assert program is not None
        self._launch([program, str(self.folder / "ini")], **identity)
        wait_for(lambda: "process up" in self.log.read_text(), "PgBouncer to start")

    def _certify(self, identity: dict[str, str]) -> None:
        request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
        files = ["-keyout", "key", "-out", "certificate"]
        subprocess.run([*request, *files], cwd=self.folder, check=True, capture_output=True, **identity)  # type: ignore[call-overload]


def take_all(broker: Broker, queue: str) -> list[Message]:
    """Take the messages that wait in a queue."""
    with Connection(broker.url) as connection:
        channel = connection.default_channel
        with suppress(OperationalError, *connection.channel_errors):
            return list(iter(lambda: channel.basic_get(queue, no_ack=True), None))
        return []


def put(broker: Broker, queue: str, messages: list[Message]) -> None:
    """Put such messages into a queue, as they were."""
    with Connection(broker.url) as connection, connection.Producer() as producer:
        for message in messages:
            producer.publish(
                message.body, routing_key=queue, headers=message.headers, content_type=message.content_type,
                content_encoding=message.content_encoding, correlation_id=message.properties.get("correlation_id"),
            )  # fmt: skip


def depth(broker: Broker, queue: str) -> int:
    """Return how many messages wait in a queue."""
    with Connection(broker.url) as connection:
        with suppress(OperationalError, *connection.channel_errors):
            return int(connection.default_channel.queue_declare(queue, passive=True).message_count)
        return 0


def free_port() -> int:
    """Return a port that nobody listens on, below those of outgoing connections."""
    return local._free_port()
