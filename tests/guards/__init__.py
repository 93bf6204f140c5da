"""Is each guard of vkjobs needed? It is taken out of a copy, and the tests that are named for it must fail there."""

from __future__ import annotations

from guards import around_it, in_the_ledger, in_the_process, of_many
from guards.guard import Guard

GUARDS: tuple[Guard, ...] = (*in_the_ledger.GUARDS, *in_the_process.GUARDS, *around_it.GUARDS, *of_many.GUARDS)
