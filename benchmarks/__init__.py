"""What vkjobs costs and how late it is, beside bare Celery and three job queues in Postgres.

``python -P -m benchmarks <name>`` runs one benchmark on servers of its own. Each is a module here; `systems` has one
for each system that is measured.
"""
