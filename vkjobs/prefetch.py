"""The job messages that a worker holds of Redis: their rows remember them, so that Redis need not.

Kombu writes each message that it delivers into a hash of Redis, and deletes it there when it is acknowledged: nearly
half of what a message costs a worker. Knows no job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu import Connection
from kombu.transport import redis, virtual


class _QoS(redis.QoS):  # type: ignore[misc]
    """Counts messages that may be lost against the prefetch limit, and no more; of others Redis keeps a copy.

    The former are never put back: not when they are rejected, nor when the worker stops or loses its connection.
    """

    def __init__(self, channel: Any, prefetch_count: int, may_be_lost: Callable[[Any], bool]) -> None:
        super().__init__(channel, prefetch_count)
        self._may_be_lost = may_be_lost
        self._light: set[str] = set()

    def append(self, message: Any, delivery_tag: str) -> None:
        if self._may_be_lost(message):
            self._light.add(delivery_tag)
            virtual.QoS.append(self, message, delivery_tag)
        else:
            super().append(message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        if delivery_tag in self._light:
            self._light.discard(delivery_tag)
            virtual.QoS.ack(self, delivery_tag)
        else:
            super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if delivery_tag in self._light:
            self.ack(delivery_tag)
        else:
            super().reject(delivery_tag, requeue=requeue)

    def restore_unacked(self, client: Any = None) -> None:
        for tag in self._light:
            self._delivered.pop(tag, None)
        self._light.clear()
        super().restore_unacked(client)


def keep_no_copies(connection: Connection, may_be_lost: Callable[[Any], bool]) -> None:
    """Let Redis keep no copy of the messages that this connection's default channel delivers and that may be lost.

    Of another broker, the acknowledgements cost little, and stay as they are.
    """
    channel = connection.default_channel
    if isinstance(channel, redis.Channel) and channel.ack_emulation:
        unused = channel.qos  # nothing has been delivered yet
        channel._qos = _QoS(channel, unused.prefetch_count, may_be_lost)
