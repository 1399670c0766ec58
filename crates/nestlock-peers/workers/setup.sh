#!/bin/sh
# Builds the workers of other languages, with the libraries that tests/interop/setup.sh installs. A worker that cannot be
# built is missing when the run starts, and the run reports it as absent.
set -eu
cd "$(dirname "$0")"
root=$(cd ../../.. && pwd)
out=$root/target/interop

"$root/tests/interop/setup.sh" || echo 'peers: not all libraries could be installed' >&2
mkdir -p "$out/redisson"
(cd redsync && go build -o "$out/peers-redsync" .) || { rm -f "$out/peers-redsync"; echo 'peers: no redsync' >&2; }
javac -d "$out/redisson/peers" -cp "$out/redisson/lib/*" redisson/Worker.java ||
    { rm -rf "$out/redisson/peers"; echo 'peers: no Redisson' >&2; }
