# The commands of this repository. `make study` and `make test` work on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
STUDY ?= studies/comba_ablation.yaml

.PHONY: study test check picture clean

study: .venv/installed
	$(BIN)/platform study run $(STUDY)
	@echo
	@echo "The same as a page, with learning curves: $(BIN)/platform dashboard"

test: .venv/installed-dev check
	$(BIN)/pytest -n 2

check: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

picture: .venv/installed-dev
	$(BIN)/python -m deltalab_dashboard.picture --study comba_ablation docs/dashboard.png

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[hf,postgres,dev]'
	touch $@

clean:
	rm -rf .venv
