#!/usr/bin/env bash
# Puts each defect of this folder, or each that is named, into a copy of the tree. The tests under shuttle must find it: one
# that survives fails.
set -euo pipefail
cd "$(dirname "$0")/../.."
# one of its own: in the tree's, cargo takes what was built of the copy for what it would build of the tree
export CARGO_TARGET_DIR=$PWD/target/mutants
copy=$CARGO_TARGET_DIR/tree log=$CARGO_TARGET_DIR/log survivors=0
patches=(tests/mutants/*.patch)
if [ $# -gt 0 ]; then
	patches=("${@/#/tests/mutants/}")
	patches=("${patches[@]/%/.patch}")
fi
tests=(engine::wait::tests engine::due::tests engine::hold::tests)

fresh() {
	rm -rf "$copy" && mkdir -p "$copy"
	git ls-files -z | xargs -0 tar -cf - | tar -xmf - -C "$copy"
}
run() { (cd "$copy" && cargo test --quiet --lib --all-features "$@") >"$log" 2>&1; }

fresh
run -- "${tests[@]}" || { cat "$log"; echo 'they fail without any defect'; exit 1; }
for patch in "${patches[@]}"; do
	fresh
	patch --quiet --strip=1 --directory="$copy" <"$patch"
	run --no-run || { cat "$log"; echo "$patch: does not compile"; exit 1; }
	from=$SECONDS
	if run -- "${tests[@]}"; then
		echo "SURVIVED  $patch" && survivors=1
	else
		echo "fell      $patch: in $((SECONDS - from)) s"
		sed -n -e 's/^---- \(.*\) stdout ----$/          \1/p' -e 's/^failed in run/            &/p' "$log"
	fi
done
exit $survivors
