# make demo | test | check | bench | clean
#
# Each target first brings .venv up to date: it is made where it is missing, and installed into again when what is to be
# installed has changed.

VENV := .venv
PYTHON ?= python3
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
IGNITE_SUITE := $(VENV)/ignite-suite

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# the same versions for the environments in which packages are built (older and newer pips read different names)
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt

.PHONY: demo test check bench clean

demo: $(INSTALLED)
	$(RUN) examples/digits.py

test: $(INSTALLED) $(IGNITE_SUITE)
	$(VENV)/bin/pytest --numprocesses 2 --dist loadfile --durations 25

check: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m mypy examples tools
	$(RUN) tools/check_wheel.py

bench: $(INSTALLED)
	$(RUN) benchmarks/overhead.py
	$(RUN) benchmarks/updates.py
	$(RUN) benchmarks/parallel.py
	$(RUN) benchmarks/checkpoints.py
	$(RUN) benchmarks/loggers.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

# Ignite's own tests of its engine, out of its source archive: tests/test_ignite_suite.py runs them on ours.
$(IGNITE_SUITE): constraints.txt tools/fetch_ignite_suite.py | $(INSTALLED)
	$(RUN) tools/fetch_ignite_suite.py $@
	touch $@
