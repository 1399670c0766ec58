#!/bin/sh
# Installs whatever the interop tests need and is missing: see README.md. Everything goes into target/interop; nothing
# is written into the source tree.
set -eu
cd "$(dirname "$0")"
out=$(cd ../.. && pwd)/target/interop
mkdir -p "$out"

# --- missing programs, from the system's packages ---

missing=
want() { # PACKAGE COMMAND...: wants the package, unless the command works
    package=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}
want golang-go go version
want nodejs node --version
want npm npm --version
want php-cli php --version
want php-redis php -r 'exit(extension_loaded("redis") ? 0 : 1);'
want python3-venv python3 -c 'import ensurepip'
want default-jdk-headless javac -version
want maven mvn --version
if [ -n "$missing" ]; then
    if ! command -v apt-get >/dev/null; then
        echo "Please install these packages, or their equivalents on your system:$missing" >&2
        exit 1
    fi
    sudo=
    [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo apt-get update
    # shellcheck disable=SC2086 # several words
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing
fi

# --- the libraries, as the lock files pin them; a copy of the last installed lock file shows whether it is done ---

(cd redsync && go build -o "$out/redsync" .)
# its time must be newer than that of the source
touch "$out/redsync"

if ! cmp -s python/requirements.txt "$out/venv/requirements.txt"; then
    rm -rf "$out/venv"
    python3 -m venv "$out/venv"
    "$out/venv/bin/pip" install --quiet --requirement python/requirements.txt
    cp python/requirements.txt "$out/venv/requirements.txt"
fi

if ! cmp -s node/package-lock.json "$out/node/installed.json"; then
    rm -rf "$out/node"
    mkdir -p "$out/node"
    cp node/package.json node/package-lock.json "$out/node"
    (cd "$out/node" && npm ci --no-audit --no-fund)
    cp node/package-lock.json "$out/node/installed.json"
fi

if ! cmp -s redisson/jars.sha256 "$out/redisson/installed.sha256"; then
    rm -rf "$out/redisson"
    mkdir -p "$out/redisson"
    cp redisson/pom.xml "$out/redisson"
    (cd "$out/redisson" && mvn --batch-mode --quiet dependency:copy-dependencies -DoutputDirectory=lib)
    sums=$(pwd)/redisson/jars.sha256
    (cd "$out/redisson/lib" && sha256sum --quiet --strict --check "$sums")
    cp redisson/jars.sha256 "$out/redisson/installed.sha256"
fi
javac -d "$out/redisson/classes" -cp "$out/redisson/lib/*" redisson/Worker.java
