"""The scenarios, by what they break, in the order in which they run."""

from . import workers, bulk, brokers, databases, ticks, phases  # noqa: F401, I001
