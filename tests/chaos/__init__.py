"""Faults on a seeded schedule against real workers, Postgres, Redis and RabbitMQ: ``python -m chaos`` runs them."""
