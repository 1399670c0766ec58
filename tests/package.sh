#!/usr/bin/env bash
# Packs the crates that are published, and builds what each package holds. Their names stand in target/package/order, each after
# those that it needs. cargo's own check would take an older crate of the same version, if cargo's home has one: it unpacks each
# version once.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
target=${CARGO_TARGET_DIR:-$PWD/target}
# dev-dependencies are left out, as in the packages
crates=$("$cargo" metadata --locked --no-deps --format-version 1 | python3 -c '
import graphlib, json, sys

crates = {crate["name"]: crate for crate in json.load(sys.stdin)["packages"] if crate["publish"] != []}
needs = {
    name: [need["name"] for need in crate["dependencies"] if need["kind"] != "dev" and need["name"] in crates]
    for name, crate in crates.items()
}
print(*graphlib.TopologicalSorter(needs).static_order())')
# of earlier versions
rm -f "$target"/package/*.crate
# shellcheck disable=SC2086 # several words
"$cargo" package --quiet --allow-dirty --no-verify $(printf ' -p %s' $crates)
# outside of this workspace
packed=$(mktemp -d)
trap 'rm -rf "$packed"' EXIT
# where each package finds those before it
patches=$packed/patches.toml
touch "$patches"
for crate in $crates; do
    mkdir "$packed/$crate"
    tar xzf "$target"/package/"$crate"-[0-9]*.crate -C "$packed/$crate" --strip-components 1
    # of no workspace that may be above
    printf '\n[workspace]\n' >>"$packed/$crate/Cargo.toml"
    CARGO_TARGET_DIR=$target/packed "$cargo" check --quiet --all-features --manifest-path "$packed/$crate/Cargo.toml" \
        --config "$patches"
    printf '[patch.crates-io.%s]\npath = "%s"\n' "$crate" "$packed/$crate" >>"$patches"
done
echo "$crates" >"$target/package/order"
echo "the packages hold what they need: $crates"
