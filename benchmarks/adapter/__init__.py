"""An adapter for the open benchmark of job queues in Postgres (hardbyte/postgresql-job-queue-benchmarking).

``python -P -m benchmarks.adapter [system]`` is one process that produces and consumes jobs until SIGTERM, told by
environment variables what to do, with its telemetry on stdout. ``adapter.json`` is vkjobs' manifest. The same process
runs two peers, so that `benchmarks.pressure` drives all alike.
"""
