"""Settings of this deployment, in Celery's form; `celery -A vkjobs` reads them from the folder that it is started in.

A ``vkjobs_…`` key here gives way to its VKJOBS_… in the environment: the database (VKJOBS_DATABASE_URL), the broker
(VKJOBS_BROKER_URL) and the task service (VKJOBS_TASK_SERVICE) are best set there. README.md lists all keys.
"""

# Modules of the deployment's own that register handlers, beside the marketplace's kinds.
include: list[str] = []

# Seconds.
vkjobs_tick = 1.0
vkjobs_lease = 60.0

timezone = "UTC"
