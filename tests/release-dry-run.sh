#!/usr/bin/env bash
# All of a release but the tag and the upload: see RELEASING.md.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}

if [ -n "$(git status --porcelain)" ]; then
    git status --short >&2
    echo 'There are changes that are not committed. A release is made from a commit: commit or remove them.' >&2
    exit 1
fi
commit=$(git rev-parse HEAD)
"${MAKE:-make}" check
crates=$(cat "$target/package/order")

printf '\nWould be uploaded, in this order, from commit %s:\n' "$commit"
for crate in $crates; do
    file=$(echo "$target"/package/"$crate"-[0-9]*.crate)
    name=$(basename "$file" .crate)
    printf '%-18s %-8s %9d bytes  sha256 %s\n' \
        "$crate" "${name#"$crate"-}" "$(wc -c <"$file")" "$(sha256sum "$file" | cut -d' ' -f1)"
done
if grep -q '^repository = ""' Cargo.toml; then
    printf '\nCargo.toml has no address of the repository yet: fill `repository` under `[workspace.package]`.\n'
fi
if grep -q '^## Unreleased' CHANGELOG.md; then
    printf '\nCHANGELOG.md still says "Unreleased": its heading needs the version and the day.\n'
fi
cat <<END

Nothing was uploaded. What remains is done by hand, as RELEASING.md says:
  1. the long checks: make ci, make mutants, make sim-long; cargo deny check; cargo semver-checks
  2. the signed tag of this commit, with the list above in its message
  3. cargo publish --locked -p CRATE, for each crate of the list, in its order
END
