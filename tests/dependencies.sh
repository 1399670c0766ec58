#!/bin/sh
# Fails if nestlock has more dependencies than $1, with the features that the other arguments choose.
set -eu
cd "$(dirname "$0")/.."
most=$1
shift
tree=$(${CARGO:-cargo} tree --locked -p nestlock --edges normal --prefix none "$@")
many=$(($(echo "$tree" | cut -d' ' -f1,2 | sort -u | wc -l) - 1))
echo "nestlock $* has $many dependencies, and may have $most"
[ "$many" -le "$most" ]
