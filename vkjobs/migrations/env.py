"""Alembic's environment, which Alembic loads: runs the revisions on the connection that ``migrate`` opened and locked."""

from __future__ import annotations

from alembic import context
from sqlalchemy import text

from vkjobs.migrations import VERSION_TABLE
from vkjobs.schema import TABLE

connection = context.config.attributes["connection"]
# Beside the table, wherever in the search path that is: another role may have another current schema.
schema = connection.scalar(
    text("""
        select coalesce((select relnamespace from pg_class where oid = to_regclass(:table))::regnamespace::name,
                        current_schema())"""),
    {"table": TABLE},
)
context.configure(connection=connection, version_table=VERSION_TABLE, version_table_schema=schema)
with context.begin_transaction():
    context.run_migrations()
