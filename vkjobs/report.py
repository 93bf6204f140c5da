"""The text of ``last_error``: readable, safe for Postgres, bounded, whatever the exception. Knows no job."""

from __future__ import annotations

import traceback

_NOTE_SIZE = 40


def describe(error: BaseException, size: int) -> str:
    """Return ``Class: message`` and the traceback, as text of at most ``size`` characters that Postgres can store."""
    try:
        trace = "".join(traceback.format_exception(error, limit=-50, chain=True))
    except BaseException as failure:  # noqa: BLE001 - formatting runs the exception's own code
        trace = f"(no traceback: formatting it raised {_class(failure)})"
    return shorten(f"{headline(error, size)}\n\n{storable(trace)}", size)


def headline(error: BaseException, size: int = 1000) -> str:
    """Return ``Class: message`` of at most ``size`` characters; only the class if there is no message to be had."""
    try:
        message = "".join(str(error))  # no subclass of str with a mind of its own
    except BaseException as failure:  # noqa: BLE001 - __str__ may raise whatever it likes
        message = f"(no message: its __str__ raised {_class(failure)})"
    return shorten(storable(f"{_class(error)}: {message}" if message else _class(error)), size)


def _class(error: BaseException) -> str:
    return str(type.__dict__["__name__"].__get__(type(error)))  # not what a metaclass may make of it


def storable(text: str) -> str:
    r"""Return ``text`` with what Postgres cannot store, NUL and lone surrogates, written as an escape.

    >>> storable("before\0after \ud800")
    'before\\x00after \\ud800'
    """
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def shorten(text: str, size: int) -> str:
    r"""Return at most ``size`` characters of ``text``, its head and tail, and between them how much was left out.

    >>> shorten("a" * 60 + "b" * 60, 60)
    'aaaaaaaaaa\n... 100 characters left out ...\nbbbbbbbbbb'
    """
    if len(text) <= size:
        return text
    kept = size - _NOTE_SIZE
    head, tail = text[: kept // 2], text[len(text) - kept // 2 :]
    return f"{head}\n... {len(text) - len(head) - len(tail):,} characters left out ...\n{tail}"
