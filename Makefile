# What CI runs, and what you run before a commit. `make` lists the targets.

CARGO    ?= cargo
# one feature set for everything, so that nothing is built twice
FEATURES := --all-features
EXAMPLES := $(notdir $(basename $(wildcard examples/*.rs)))
SUDO     := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: help setup components check package test bench demo ci

help:
	@echo 'make setup   install redis-server if it is missing'
	@echo 'make check   format, clippy, docs and packaging, warnings denied'
	@echo 'make test    setup, then every test'
	@echo 'make demo    setup, then every example'
	@echo 'make bench   setup, then the benchmarks'
	@echo 'make ci      test, check and demo: what CI runs'

setup:
	@if command -v redis-server >/dev/null; then \
		echo "redis-server is there: $$(redis-server --version | cut -d' ' -f1-3)"; \
	elif command -v apt-get >/dev/null; then \
		$(SUDO) apt-get update && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y redis-server; \
	elif command -v brew >/dev/null; then \
		brew install redis; \
	else \
		echo 'Please install redis-server (Redis 6 or later) and put it on PATH: it is needed by tests and examples.' >&2; \
		exit 1; \
	fi

components:
	@$(CARGO) fmt --version >/dev/null 2>&1 || rustup component add rustfmt
	@$(CARGO) clippy --version >/dev/null 2>&1 || rustup component add clippy

check: components
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets $(FEATURES) -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps $(FEATURES)
	$(MAKE) package

# builds the crate from nothing but what would be published; uncommitted changes count too
package:
	$(CARGO) package --allow-dirty

test: setup
	$(CARGO) test --workspace $(FEATURES)

demo: setup
	$(CARGO) build --examples $(FEATURES)
	$(CARGO) build -p nestlock-examples-sql
	@set -e; for example in $(EXAMPLES); do \
		echo "--- $$example"; \
		$(CARGO) run --quiet --example $$example $(FEATURES); \
	done
	@echo '--- nestlock-examples-sql'
	@$(CARGO) run --quiet -p nestlock-examples-sql

bench: setup
	$(CARGO) bench --workspace $(FEATURES)

ci:
	./.ci/run
