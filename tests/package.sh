#!/bin/sh
# Packs nestlock and nestlock-wire, and builds what the packages hold. cargo's own check would take an older nestlock-wire of
# the same version, if cargo's home has one: it unpacks each version once.
set -eu
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
target=${CARGO_TARGET_DIR:-$PWD/target}
$cargo package --quiet --allow-dirty --no-verify -p nestlock-wire -p nestlock
# outside of this workspace
packed=$(mktemp -d)
trap 'rm -rf "$packed"' EXIT
for package in nestlock-wire nestlock; do
    mkdir "$packed/$package"
    tar xzf "$target"/package/"$package"-[0-9]*.crate -C "$packed/$package" --strip-components 1
    # of no workspace that may be above
    printf '\n[workspace]\n' >>"$packed/$package/Cargo.toml"
done
CARGO_TARGET_DIR=$target/packed $cargo check --quiet --all-features --manifest-path "$packed/nestlock/Cargo.toml" \
    --config "patch.crates-io.nestlock-wire.path = \"$packed/nestlock-wire\""
echo 'the packages hold what they need'
