#!/usr/bin/env bash
# Clippy over the published crates with few of their features: all subsets of up to three, otherwise none, each alone, and all.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
"$cargo" metadata --locked --no-deps --format-version 1 | python3 -c '
import itertools, json, sys

for crate in json.load(sys.stdin)["packages"]:
    features = sorted(set(crate["features"]) - {"default"})
    if crate["publish"] == [] or not features:
        continue
    few = len(features) <= 3
    sizes = range(len(features) + 1) if few else (0, 1, len(features))
    for size in sizes:
        for chosen in itertools.combinations(features, size):
            print(crate["name"], ",".join(chosen) or "-")
' | while read -r crate features; do
    "$cargo" clippy --quiet -p "$crate" --no-default-features --features "${features#-}" --lib --bins </dev/null -- -D warnings ||
        { echo "$crate with the features: $features" >&2; exit 1; }
done
# unit tests without the default features are compiled; `make test-lean` runs them
"$cargo" clippy --quiet -p nestlock --no-default-features --lib --tests -- -D warnings
echo 'clippy is content with each set of features'
