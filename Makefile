# The commands of CI, and for use before a commit. `make` lists the targets.

CARGO    ?= cargo
# one feature set for all targets, so that nothing is built twice
FEATURES := --all-features
EXAMPLES := $(notdir $(basename $(wildcard examples/*.rs)))
RECIPES  := $(notdir $(basename $(wildcard crates/nestlock-recipes/examples/*.rs crates/nestlock-examples-*/examples/*.rs)))
# always build the whole workspace: for a single package, cargo would rebuild the dependencies. The lock libraries that only
# nestlock-peers needs are built by lint alone
ALL      := --workspace --exclude nestlock-peers
BUILD    := $(CARGO) build --quiet $(ALL) $(FEATURES) --bins --examples
BUILT    := $${CARGO_TARGET_DIR:-target}/debug
SUDO     := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
# runs CPU-bound work alongside tests that mostly wait: it only gets processors that are otherwise idle
SPARE    := $(shell chrt --idle 0 true 2>/dev/null && echo chrt --idle 0 || echo nice -n 19)

.PHONY: help setup components check lint features api api-record package release-dry-run test test-busy test-fred test-lean versions versions-few versions-setup dashboard mutants mutants-few sim sim-long states soak built interop interop-setup bench peers peers-red beside-the-build beside-the-soak demo ci

help:
	@echo 'make setup   install redis-server if there is no server program'
	@echo 'make check   format, clippy with each set of features, docs, the public API and packaging, warnings denied'
	@echo 'make api-record  writes api.txt, with which check compares the public API'
	@echo 'make lint    only the format, clippy and docs'
	@echo 'make features     only clippy with each set of features'
	@echo 'make release-dry-run  check, then packs and builds each published crate, without the upload: RELEASING.md'
	@echo 'make test    setup, then every test: on a real server, then on the embedded one'
	@echo 'make test-busy    `tests/it` on a machine that is kept busy, RUNS=10 times: more than an hour'
	@echo 'make test-fred    the same tests over the client of the fred crate, on a real server'
	@echo 'make test-lean    the same tests without the feature fred, on a real server'
	@echo 'make mutants known defects, one after the other, and which tests notice: MUTANTS=all WAYS="models sim soak it" SEEDS=60; hours'
	@echo 'make mutants-few  a few of them; 5 seeds of the simulator must find each'
	@echo 'make sim     simulates SEEDS=200 programs for each kind of lock; part of `make test`'
	@echo 'make sim-long     20,000 of each: hours'
	@echo 'make states  every order of events of a hold, within bounds: 3 to 5 minutes'
	@echo 'make soak    processes, servers and faults for SECONDS=60 with SEED=random, MODE=all: crates/nestlock-soak'
	@echo 'make versions  the tests that depend on the server, on Redis 6.2 to 8.2 and Valkey 8.1 to 9.1: VERSIONS="6.2 8.2"; minutes'
	@echo 'make versions-few  some of them, on 3 versions'
	@echo 'make dashboard  checks each expression of docs/grafana.json with Prometheus, which it installs; PNG=file draws them, with matplotlib'
	@echo 'make interop tests nestlock with the libraries of other languages; installs them first'
	@echo 'make demo    every example'
	@echo 'make bench   setup, then the benchmarks'
	@echo 'make peers   compares nestlock with the locks of 5 languages, into docs/: ROUNDS=9 SECONDS=1; installs as `make interop` does'
	@echo 'make peers-red    compares its RedLock with redsync and rslock'
	@echo 'make ci      test, mutants-few, soak, versions-few, interop, check and demo: what CI runs'

setup:
	@server=$${NESTLOCK_SERVER_BIN:-$$(command -v redis-server || command -v valkey-server)}; \
	if [ -n "$$server" ]; then \
		echo "the server program is $$server: $$("$$server" --version | cut -d' ' -f1-3)"; \
	elif command -v apt-get >/dev/null; then \
		$(SUDO) apt-get update && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y redis-server; \
	elif command -v brew >/dev/null; then \
		brew install redis; \
	else \
		echo 'Please install redis-server (Redis 6 or later) and put it on PATH, or set NESTLOCK_SERVER_BIN to its path: tests and benchmarks need it.' >&2; \
		exit 1; \
	fi

components:
	@$(CARGO) fmt --version >/dev/null 2>&1 || rustup component add rustfmt
	@$(CARGO) clippy --version >/dev/null 2>&1 || rustup component add clippy

check: lint features api package

# whose links are checked
PAGES    := nestlock nestlock_wire nestlock_embedded nestlock_recipes nestlock_macros

lint: components
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets $(FEATURES) -- -D warnings
	# as plain `cargo test`, clippy skips targets with `test = false`: name them
	$(CARGO) clippy --workspace --test interop $(FEATURES) -- -D warnings
	# without fred's client, and how many dependencies remain
	$(CARGO) clippy -p nestlock-wire --no-default-features --all-targets -- -D warnings
	$(CARGO) clippy -p nestlock --no-default-features -- -D warnings
	$(CARGO) clippy $(LEAN) --all-targets -- -D warnings
	tests/dependencies.sh 105
	tests/dependencies.sh 45 --no-default-features
	# pages that earlier sources had would stay
	rm -rf $(BUILT)/../doc
	# rustdoc links to another crate only if its folder is there, and cargo documents them in any order
	mkdir -p $(addprefix $(BUILT)/../doc/,$(PAGES))
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps $(FEATURES)
	tests/dead-links.py $(BUILT)/../doc $(PAGES)

# the published crates with few of their features. Minutes, so CI's workflow has a job for it
features: components
	./tests/features.sh

# compares the public API with api.txt; needs the toolchain of CI, because the format is unstable
api:
	$(BUILD)
	$(BUILT)/nestlock-api

api-record:
	$(BUILD)
	$(BUILT)/nestlock-api record

# builds the crates that are published from only the files that would be uploaded, including uncommitted changes
package:
	./tests/package.sh

# all of a release but the tag and the upload; refuses uncommitted changes
release-dry-run:
	./tests/release-dry-run.sh

# 16 threads, since the tests mostly wait: the simulator, which is CPU-bound, gets the rest of the processors. Tests that
# always use real servers, or none, are part of the first line. A failed test runs once more, alone: STRICT=1 counts it as failed
ALONE    := target/passed-only-alone
AGAIN    = tests/again.py $(ALONE) $(CARGO) test $(ALL) $(FEATURES)
test: export RUST_TEST_THREADS := 16
test: setup
	@mkdir -p target; rm -f $(ALONE); $(SPARE) $(MAKE) sim >target/sim.log 2>&1 & sim=$$!; trap 'kill $$sim 2>/dev/null || true' EXIT; set -ex; \
	NESTLOCK_TEST_SERVER=real $(AGAIN); \
	NESTLOCK_TEST_SERVER=embedded $(AGAIN) --test it -- --skip cluster:: --skip sentinel:: --skip house:: --skip tls::; \
	wait $$sim || { cat target/sim.log; exit 1; }; \
	cat target/sim.log; \
	cat $(ALONE) 2>/dev/null || true

test-fred: export RUST_TEST_THREADS := 16
test-fred: setup
	NESTLOCK_TEST_SERVER=real NESTLOCK_TEST_WIRE=fred $(CARGO) test $(ALL) $(FEATURES) --test it

# features that differ from the workspace's are built into a separate folder
LEAN := -p nestlock --no-default-features --features metrics,rustls
test-lean: export RUST_TEST_THREADS := 16
test-lean: setup
	CARGO_TARGET_DIR=target/lean NESTLOCK_TEST_SERVER=real $(CARGO) test $(LEAN) --lib --test it

# with two busy processes alongside, and the test program stopped now and then. A failure is a defect of the test
RUNS ?= 10
test-busy: export RUST_TEST_THREADS := 16
test-busy: setup
	NESTLOCK_TEST_SERVER=real tests/busy.py $(RUNS) $$($(CARGO) test $(ALL) $(FEATURES) --test it --no-run 2>&1 | sed -n 's/.*Executable.*(\(.*\))$$/\1/p')

# default: all VERSIONS; see tests/versions/README.md
versions: setup
	./tests/versions/run.sh $(VERSIONS)

versions-few: setup
	./tests/versions/run.sh few

versions-setup:
	./tests/versions/run.sh setup

dashboard:
	@command -v prometheus >/dev/null || { $(SUDO) apt-get update && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends prometheus; }
	$(BUILD)
	./tests/metrics/dashboard.py $(BUILT)/examples/metrics $(PNG)

# a failing seed prints how to replay it: crates/nestlock-sim/README.md
SEEDS ?= 200
sim:
	$(CARGO) run --release --quiet -p nestlock-sim -- seeds=$(SEEDS)

sim-long:
	$(MAKE) sim SEEDS=20000

# every order of events within bounds; 3 to 5 minutes
states:
	$(CARGO) test -p nestlock --lib $(FEATURES) transitions -- --include-ignored --nocapture

# in a copy of the tree: see tests/mutants/README.md; MUTANTS='name name' for some of them
mutants: export WAYS = models sim soak it
mutants: export SEEDS = 60
mutants: setup
	./tests/mutants/run.py $(MUTANTS)

mutants-few:
	./tests/mutants/run.py few

# MODE is none, aof, plain, or all: one after the other. SECONDS is expanded by make: bash has a variable of that name
soak: SECONDS = 60
soak: SEED = random
soak: MODE = all
soak: setup
	$(BUILD)
	$(BUILT)/nestlock-soak run seconds=$(SECONDS) seed=$(SEED) mode=$(MODE)

interop-setup: setup
	./tests/interop/setup.sh

# 4 at a time, since they mostly wait
interop: ALONE := -
interop: interop-setup
	$(AGAIN) --test interop -- --show-output --test-threads=4

demo:
	$(BUILD)
	@set -e; for example in $(EXAMPLES) $(RECIPES); do \
		echo "--- $$example"; \
		$(BUILT)/examples/$$example; \
	done
	@echo '--- nestlock-examples-axum'
	@$(BUILT)/nestlock-examples-axum

bench: setup
	$(CARGO) bench --workspace --exclude nestlock-peers $(FEATURES)

# not part of ci: needs what `make interop` installs. About 11 minutes; a trial with ROUNDS=1 SECONDS=0.3 takes 2
peers: ROUNDS = 9
peers: SECONDS = 1
peers: setup
	./crates/nestlock-peers/workers/setup.sh
	$(CARGO) bench -p nestlock-peers --bench peers -- rounds=$(ROUNDS) seconds=$(SECONDS)

peers-red: setup
	./tests/interop/setup.sh
	$(CARGO) bench -p nestlock-peers --bench red

# builds what `make soak` and `make interop` run
built:
	$(BUILD)
	$(CARGO) test --quiet $(ALL) $(FEATURES) --test interop --no-run

# downloads, alongside the build
beside-the-build: setup
	$(SPARE) $(MAKE) interop-setup versions-setup

# CPU-bound work, alongside tests that mostly wait; in a separate folder, because cargo locks the one it builds in
beside-the-soak:
	CARGO_TARGET_DIR=target/lint $(SPARE) $(MAKE) lint
	$(SPARE) $(MAKE) api package

ci:
	./.ci/run
