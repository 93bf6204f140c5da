"""What Alembic loads to run the revisions, on the connection that ``migrate`` opened. Opens none itself."""

from __future__ import annotations

from alembic import context
from sqlalchemy import text

from vkjobs.migrations import VERSION_TABLE
from vkjobs.schema import TABLE

connection = context.config.attributes["connection"]
# Beside the table, wherever in the search path that is: another role may have another current schema.
schema = connection.scalar(
    text("""
        select coalesce(
            (select nspname from pg_class join pg_namespace on pg_namespace.oid = relnamespace
             where pg_class.oid = to_regclass(:table)),
            current_schema())"""),
    {"table": TABLE},
)
context.configure(connection=connection, version_table=VERSION_TABLE, version_table_schema=schema)
with context.begin_transaction():
    context.run_migrations()
