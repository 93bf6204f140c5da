from __future__ import annotations

import logging

import pytest

from vkjobs.events import emit


def logged(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    (record,) = caplog.records
    return record


def test_an_event_is_one_line_with_its_fields_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    emit(logging.ERROR, "job failed", job_id=7, kind="open_expire", ref_id=None, final=True)
    assert logged(caplog).getMessage() == "job failed job_id=7 kind=open_expire ref_id=None final=True"
    assert (logged(caplog).name, logged(caplog).levelno) == ("vkjobs", logging.ERROR)


def test_an_event_without_fields_is_its_name(caplog: pytest.LogCaptureFixture) -> None:
    emit(logging.WARNING, "beat ticks again 100%")
    assert logged(caplog).getMessage() == "beat ticks again 100%"


def test_a_log_handler_finds_the_event_and_its_fields_on_the_record(caplog: pytest.LogCaptureFixture) -> None:
    emit(logging.WARNING, "job failed", job_id=7, error="ValueError: no")
    record = vars(logged(caplog))
    assert (record["event"], record["job_id"], record["error"]) == ("job failed", 7, "ValueError: no")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        ("приём🎉", "приём🎉"),
        ("", "''"),
        ("two words", "'two words'"),
        ("a=b", "'a=b'"),
        ('say "no"', "'say \"no\"'"),
        ("a\nb\r\x1b[31m", r"'a\nb\r\x1b[31m'"),
        ("a\u2028b", r"'a\u2028b'"),
        ("a\0\ud800", r"'a\x00\ud800'"),
        ("%s %(x)d", "'%s %(x)d'"),
        (1.5, "1.5"),
        ([1, 2], "'[1, 2]'"),
    ],
)
def test_a_value_never_breaks_the_line(caplog: pytest.LogCaptureFixture, value: object, shown: str) -> None:
    emit(logging.WARNING, "seen", value=value, more=1)
    assert logged(caplog).getMessage() == f"seen value={shown} more=1"


def test_an_event_below_the_level_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Dear:
        def __str__(self) -> str:
            raise AssertionError

    caplog.set_level(logging.WARNING, "vkjobs")
    emit(logging.INFO, "seen", value=Dear())
    assert caplog.records == []
    with pytest.raises(AssertionError):
        emit(logging.WARNING, "seen", value=Dear())
