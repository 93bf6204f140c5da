from __future__ import annotations

import doctest

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vkjobs import report

ANY_TEXT = st.text(st.one_of(st.characters(exclude_categories=()), st.sampled_from("\0\ud800\udfff")), max_size=300)
LONG_TEXT = st.builds(lambda text, times: text * times, st.text(min_size=1, max_size=20), st.integers(0, 200))
SMALLEST = 200
"""The least that vkjobs_error_size may be."""


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_the_examples_hold() -> None:
    assert doctest.testmod(report).attempted >= 2
    assert doctest.testmod(report).failed == 0


@settings(deadline=None)
@given(ANY_TEXT)
@example("a \0 NUL")
@example("a \ud800 lone surrogate")
def test_whatever_the_text_postgres_can_store_it_and_the_rest_is_as_it_was(text: str) -> None:
    stored = report.storable(text)
    assert "\0" not in stored
    stored.encode()
    assert report.storable(stored) == stored
    if "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text):
        assert stored == text


@settings(deadline=None)
@given(LONG_TEXT, st.integers(40, 1_000))
@example("too long " * 20, 100)
def test_a_text_is_cut_to_its_size_and_says_how_much_was_left_out(text: str, size: int) -> None:
    short = report.shorten(text, size)
    assert len(short) <= size
    if len(text) <= size:
        assert short == text
        return
    head, tail = text[: size // 2 - 20], text[len(text) - (size // 2 - 20) :]
    assert short == f"{head}\n... {len(text) - len(head) - len(tail):,} characters left out ...\n{tail}"


@settings(deadline=None)
@given(ANY_TEXT, st.integers(SMALLEST, 400))
def test_an_error_is_told_from_its_class_and_message_on_within_its_size(message: str, size: int) -> None:
    error = raised(ValueError(message))
    told = report.describe(error, size)
    assert len(told) <= size
    told.encode()
    assert "\0" not in told
    beginning = f"ValueError: {report.storable(message)}" if message else "ValueError"
    assert told.startswith(beginning[: size // 2 - 20])
    assert report.headline(error, size) == report.shorten(beginning, size)


def test_the_traceback_tells_the_lines_causes_and_groups() -> None:
    group = raised(ExceptionGroup("both", [raised(KeyError("one")), raised(OSError("two"))]))
    told = report.describe(raised(RuntimeError("outer").with_traceback(None)), 10_000)
    assert told.startswith("RuntimeError: outer\n\nTraceback (most recent call last):\n")
    assert "raise error" in told
    outer = RuntimeError("outer")
    outer.__cause__ = group
    told = report.describe(raised(outer), 10_000)
    for part in ("RuntimeError: outer", "ExceptionGroup: both", "KeyError: 'one'", "OSError: two", "direct cause"):
        assert part in told


def test_of_a_deep_traceback_the_last_frames_are_told() -> None:
    def even(levels: int) -> None:
        if not levels:
            raise ValueError("deep")
        odd(levels - 1)

    def odd(levels: int) -> None:
        even(levels - 1)  # of one function alone, Python itself would leave the repetitions out

    with pytest.raises(ValueError, match="deep") as caught:
        even(500)
    told = report.describe(caught.value, 100_000)
    assert 'raise ValueError("deep")' in told
    assert len(told) < 20_000


def test_an_error_whose_traceback_cannot_be_told_is_told_without() -> None:
    class Hostile(Exception):
        def __getattribute__(self, name: str) -> object:
            if name == "__notes__":
                raise SystemExit
            return super().__getattribute__(name)

    told = report.describe(raised(Hostile("still told")), 1_000)
    assert told == "Hostile: still told\n\n(no traceback: formatting it raised SystemExit)"


def test_a_message_that_is_no_plain_text_is_told() -> None:
    class Text(str):
        __slots__ = ()

        def __format__(self, spec: str) -> str:
            raise SystemExit

    class Hostile(Exception):
        def __str__(self) -> str:
            return Text("still told")

    assert report.headline(raised(Hostile())) == "Hostile: still told"


def test_a_class_is_named_whatever_its_metaclass_says() -> None:
    class Meta(type):
        @property
        def __name__(cls) -> str:  # type: ignore[override]
            raise SystemExit

    class Hostile(Exception, metaclass=Meta):
        pass

    assert report.headline(raised(Hostile("still told"))) == "Hostile: still told"
