# Each target installs what it needs first. What may be set on the command line:
#   PYTHON=<path>  the Python to use, 3.11 or newer
#   ARGS=…         arguments for pytest, or for a benchmark
#   FLOWER=1       the demo with Flower
#   JOBS=10000     chaos in full length; SEED=2, BROKER=redis|rabbitmq and ONLY=<scenario> choose what is run
#   ONLY=<words>   the guards with these words in name or file
#   WHEEL=1        the built wheel in place of the source tree, as in CI

PYTHON ?=
ARGS ?=
VENV = .venv$(if $(WHEEL),-wheel)$(if $(OLDEST),-oldest)
BIN = "$(VENV)/bin"
# Most tests wait for processes, so more of them run at once than there are cores. What shares a worker stays together.
PARALLEL = -n 4 --dist loadscope --no-loadscope-reorder

install = @python=$$(scripts/find-python '$(PYTHON)') && \
	"$$python" scripts/install.py "$(VENV)" $(if $(WHEEL),--wheel) $(if $(OLDEST),--oldest) --extras

.PHONY: help install demo test test-oldest guards chaos bench lint types wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

install: ## install vkjobs and all the tools into .venv
	$(install) dev

demo: ## run the example marketplace (FLOWER=1: watch it in Flower)
	$(install) local $(if $(FLOWER),flower)
	@$(BIN)/python -P -m vkjobs.marketplace.demo $(if $(FLOWER),--flower)

test: ## run the tests (ARGS="-k parity")
test-oldest: ## run the tests with the oldest dependencies that are allowed
test-oldest: OLDEST = 1
test test-oldest:
	$(install) test
	@$(BIN)/pytest $(or $(ARGS),$(PARALLEL))

guards: ## take out each guard of the source and see a test fail (ONLY=ledger)
	$(install) test
	@PYTHONPATH=tests $(BIN)/python -P -m guards $(if $(ONLY),--only '$(ONLY)')

chaos: ## break everything while jobs run (JOBS=10000 SEED=2 BROKER=redis ONLY=poison)
	$(install) local
	@PYTHONPATH=tests $(BIN)/python -P -m chaos $(if $(JOBS),--jobs $(JOBS)) $(if $(SEED),--seed $(SEED)) \
		$(if $(BROKER),--broker $(BROKER)) $(if $(ONLY),--only $(ONLY))

bench: ## measure, beside others (ARGS="lateness --json"; ARGS=--help lists all)
	$(install) bench
	@PYTHONPATH=. $(BIN)/python -P -m benchmarks $(or $(ARGS),--help)

lint: ## check style and format
	$(install) dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: ## check the types
	$(install) dev
	@$(BIN)/mypy

wheel: ## build the wheel in dist/ and see that it installs
wheel: WHEEL = 1
wheel:
	$(install)

clean: ## remove what the other targets made
	rm -rf .venv .venv-wheel .venv-oldest dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
