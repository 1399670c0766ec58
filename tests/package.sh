#!/bin/sh
# Packs crates, and builds what the packages hold: package.sh [CRATE..], each after those that it needs. Without arguments it packs
# nestlock-wire and nestlock, and builds nestlock. cargo's own check would take an older nestlock-wire of the same version, if
# cargo's home has one: it unpacks each version once.
set -eu
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
target=${CARGO_TARGET_DIR:-$PWD/target}
if [ $# -gt 0 ]; then
    build=$*
else
    build=nestlock
    set -- nestlock-wire nestlock
fi
specs=
for package; do
    specs="$specs -p $package"
    # those of earlier versions
    rm -f "$target"/package/"$package"-[0-9]*.crate
done
# shellcheck disable=SC2086 # several words
$cargo package --quiet --allow-dirty --no-verify $specs
# outside of this workspace
packed=$(mktemp -d)
trap 'rm -rf "$packed"' EXIT
# where each package finds those before it
patches=$packed/patches.toml
touch "$patches"
for package; do
    mkdir "$packed/$package"
    tar xzf "$target"/package/"$package"-[0-9]*.crate -C "$packed/$package" --strip-components 1
    # of no workspace that may be above
    printf '\n[workspace]\n' >>"$packed/$package/Cargo.toml"
    case " $build " in
        *" $package "*)
            CARGO_TARGET_DIR=$target/packed $cargo check --quiet --all-features --manifest-path "$packed/$package/Cargo.toml" \
                --config "$patches"
            ;;
    esac
    printf '[patch.crates-io.%s]\npath = "%s"\n' "$package" "$packed/$package" >>"$patches"
done
echo 'the packages hold what they need'
