# The commands of this repository. `make study` and `make test` work on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
STUDY ?= studies/comba_ablation.yaml
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: study test quick rest test-all chaos browser check resolve smoke release container docs site picture clean

study: .venv/installed
	$(BIN)/deltalab study run $(STUDY)
	@echo
	@echo "The same as a page, with learning curves: $(BIN)/deltalab dashboard"

# Formatting, types, imports, doctests, and at least one test of every contract: six minutes on two cores.
test: .venv/installed-dev
	$(MAKE) --jobs 2 --output-sync check quick

quick: .venv/installed-dev
	$(BIN)/pytest -n 2 --dist worksteal --quick

# What `quick` leaves out. After it every test has run, as by `test-all`.
rest: .venv/installed-dev
	$(BIN)/pytest -n 2 --dist worksteal --rest

# Every test, those marked slow, too.
test-all: .venv/installed-dev
	$(BIN)/pytest -n 2 --dist worksteal

# What the engine survives: 100 kills, pauses, full disks, clocks that jump. Up to 30 minutes on two quiet cores.
# CHAOS="--chaos-seed 7 --kills 20 --chaos-json chaos.json" strikes at other moments, less often, and keeps the table.
chaos: .venv/installed-dev
	timeout --signal=INT --kill-after=60 1800 $(BIN)/python -m pytest -m chaos -n 2 --dist worksteal tests/chaos $(CHAOS)

# The dashboard in Chromium: every page with every kind of study. 13 minutes on two cores. It needs `apt-get install chromium`.
browser: .venv/installed-browser
	$(BIN)/python -m pytest -m browser -rs tests/browser

check: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The pins, on PyPI alone: for Python 3.11, 3.12 and 3.13.
resolve: .venv/installed-dev
	.ci/pythons resolve

# The wheel, on the Pythons that `make test` does not use. Each takes 5 GB while it runs, for torch with CUDA.
smoke: .venv/installed-dev
	.ci/pythons smoke 3.12 3.13

# The wheel and the sdist of a release in dist/, tried in an empty environment. .github/workflows/publish.yml puts them on PyPI.
release: .venv/installed-dev
	.ci/pythons release

# The lines of the Dockerfile, in an empty environment: BUILD="TORCH_INDEX=https://download.pytorch.org/whl/cpu" gives arguments.
container:
	$(PYTHON) .ci/container $(BUILD)

docs: .venv/installed-docs
	$(BIN)/mkdocs build --strict

# The site as the public sees it: the docs, and in results/ a page of each study in the ledgers that come along. A minute.
site: docs
	$(BIN)/python benchmarks/results.py site/results

picture: .venv/installed-dev
	xz -dc benchmarks/ledgers/pretrain_h200.db.xz > .venv/pretrain.db
	$(BIN)/deltalab db upgrade --db .venv/pretrain.db
	$(BIN)/python -m deltalab_dashboard.picture --db .venv/pretrain.db --study pretrain:125M docs/dashboard.png
	$(BIN)/python -m deltalab_dashboard.picture --db .venv/pretrain.db --study pretrain:125M \
	    --page 'curves?axis=tokens&split=train&metric=loss' docs/training.png

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) .
	touch $@

.venv/installed-dev: .venv/installed
	$(INSTALL) '.[train,eval,postgres,dev]'
	touch $@

# axe-playwright-python brings axe-core, which finds what keeps people from using a page.
.venv/installed-browser: .venv/installed-dev
	$(BIN)/pip install --quiet --disable-pip-version-check axe-playwright-python==0.1.8
	touch $@

.venv/installed-docs: .venv/installed
	$(INSTALL) '.[docs]'
	touch $@

clean:
	rm -rf .venv
