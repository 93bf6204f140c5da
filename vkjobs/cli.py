"""The commands ``celery -A <app> jobs …``, and ``vkjobs …`` for vkjobs' own app.

Calls, prints, and turns errors into one line; decides nothing.
"""

from __future__ import annotations

from typing import Any

import click
import psycopg2.extensions
import psycopg2.extras
from celery.bin.base import CLIContext

from vkjobs import migrations, settings
from vkjobs.errors import VkjobsError


class _Commands(click.Group):
    """Ends with one line where vkjobs says what is wrong."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except VkjobsError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands)
def jobs() -> None:
    """Look after the jobs in Postgres."""


@jobs.command()
@click.pass_obj
def migrate(context: CLIContext) -> None:
    """Create the table vk_jobs, or add what it lacks."""
    # Without it, Ctrl-C would wait as long as an index build waits for somebody's open transaction.
    psycopg2.extensions.set_wait_callback(psycopg2.extras.wait_select)
    app = context.app
    migrations.migrate(settings.load(app.conf, app.namespace).database_url, report=click.echo)


def main() -> None:
    """Run the commands for vkjobs' own app."""
    from vkjobs.celery import app  # noqa: PLC0415  # the other way in must not load a second app

    jobs(obj=CLIContext(app=app, no_color=False, workdir=None), prog_name="vkjobs")
