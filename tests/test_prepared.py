"""Prepared statements: kept by connection, done without where they are not, and broken as SQLAlchemy's are."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DataError, DBAPIError, OperationalError

from vkjobs import database
from vkjobs.prepared import Prepared

DOUBLE = Prepared("double", "select cast(:n as int) * 2, cast(:n as text) || '%'")


def prepared_on(engine: Engine) -> list[str]:
    with engine.connect() as conn:
        return list(conn.scalars(text("select statement from pg_prepared_statements order by 1")))


@pytest.fixture
def one(engine: Engine) -> Engine:
    """An engine of one connection."""
    return create_engine(engine.url, pool_size=1, max_overflow=0, isolation_level="AUTOCOMMIT")


def test_a_statement_is_prepared_once_for_each_connection(one: Engine) -> None:
    for n in (1, 2, 3):
        with one.connect() as conn:
            assert DOUBLE.execute(conn, "", {"n": n}) == ([(2 * n, f"{n}%")], 1)
    assert len(prepared_on(one)) == 1


def test_where_it_is_not_kept_it_is_sent_as_it_is(one: Engine) -> None:
    for n in (1, 2, 3):
        with one.connect() as conn:
            assert DOUBLE.execute(conn, "", {"n": n}) == ([(2 * n, f"{n}%")], 1)
            conn.execute(text("deallocate all"))
    assert prepared_on(one) == []


def test_another_client_of_a_pooler_may_have_prepared_it(one: Engine) -> None:
    with one.connect() as conn:
        DOUBLE.execute(conn, "", {"n": 1})
        del conn.info["vkjobs_prepared"]
        assert DOUBLE.execute(conn, "", {"n": 4})[0] == [(8, "4%")]
    assert len(prepared_on(one)) == 1


def test_a_table_that_is_altered_meanwhile_is_read_as_it_is(one: Engine) -> None:
    find = Prepared("find", "select * from things where id = :id")
    with one.connect() as conn:
        conn.execute(text("create table things (id int); insert into things values (1)"))
        assert find.execute(conn, "", {"id": 1})[0] == [(1,)]
        conn.execute(text("alter table things add name text default 'new'"))
        assert find.execute(conn, "", {"id": 1})[0] == [(1, "new")]


def test_lead_and_statement_are_one_transaction(one: Engine) -> None:
    shown = Prepared("shown", "select current_setting('synchronous_commit'), cast(:n as int)")
    with one.connect() as conn:
        assert shown.execute(conn, "set local synchronous_commit = off; ", {"n": 1})[0] == [("off", 1)]
        assert conn.scalar(text("show synchronous_commit")) == "on"


def test_an_error_is_sqlalchemys(one: Engine) -> None:
    with one.connect() as conn:
        with pytest.raises(DataError) as refused:
            DOUBLE.execute(conn, "", {"n": "two"})
        assert not refused.value.connection_invalidated
        assert DOUBLE.execute(conn, "", {"n": 2})[1] == 1


def test_a_connection_that_was_ended_is_replaced(one: Engine, engine: Engine) -> None:
    with one.connect() as conn:
        DOUBLE.execute(conn, "", {"n": 1})
        backend = conn.scalar(text("select pg_backend_pid()"))
    with engine.connect() as other:
        other.execute(text("select pg_terminate_backend(:pid, 5000)"), {"pid": backend})
    with one.connect() as conn, pytest.raises(OperationalError) as lost:
        DOUBLE.execute(conn, "", {"n": 1})
    assert isinstance(lost.value, DBAPIError)
    assert lost.value.connection_invalidated
    with one.connect() as conn:
        assert DOUBLE.execute(conn, "", {"n": 5})[0] == [(10, "5%")]


@pytest.mark.parametrize("prepared", [True, False])
def test_a_session_that_cannot_write_is_not_kept(database_url: str, *, prepared: bool) -> None:
    engine = database.engine(database_url, 1)
    statement = Prepared("write", "update vk_jobs set kind = :kind")

    def write() -> None:
        with engine.connect() as conn:
            if prepared:
                statement.execute(conn, "", {"kind": "k"})
            else:
                conn.execute(text(statement.sql), {"kind": "k"})

    with engine.connect() as conn:
        conn.execute(text("set default_transaction_read_only = on"))
    with pytest.raises(DBAPIError) as refused:
        write()
    assert database.is_outage(refused.value)
    write()
