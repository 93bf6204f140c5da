"""The messages that wait in a queue of a real Redis."""

from __future__ import annotations

import base64
import json
from typing import Any, NamedTuple

import redis as redis_client


class Message(NamedTuple):
    """A task's message as it lies in the broker."""

    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    headers: dict[str, Any]
    properties: dict[str, Any]
    content_type: str


def waiting(url: str, queue: str = "vkjobs") -> list[Message]:
    """Return the messages of a queue, the oldest first; those with another priority than 0 behind them."""
    with redis_client.Redis.from_url(url) as broker:
        keys = [queue, *sorted(broker.scan_iter(f"{queue}\x06\x16*"))]
        return [_message(raw) for key in keys for raw in reversed(broker.lrange(key, 0, -1))]


def _message(raw: bytes) -> Message:
    outer = json.loads(raw)
    args, kwargs, _ = json.loads(base64.b64decode(outer["body"]))
    headers = outer["headers"]
    return Message(headers["task"], args, kwargs, headers, outer["properties"], outer["content-type"])
