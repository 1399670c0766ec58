#!/usr/bin/env bash
# Puts each defect of this folder, or each that is named, into a copy of the tree. The tests under shuttle must find those in
# shuttle/, the simulator those in sim/<kind>/ within SEEDS=60 seeds of that kind, and the soak those in soak/ within three
# runs, with the words of their first lines: one that survives fails.
set -euo pipefail
cd "$(dirname "$0")/../.."
# one of its own: in the tree's, cargo takes what was built of the copy for what it would build of the tree
export CARGO_TARGET_DIR=$PWD/target/mutants
copy=$CARGO_TARGET_DIR/tree log=$CARGO_TARGET_DIR/log seeds=${SEEDS:-60} survivors=0
patches=()
for name in "${@:-*}"; do
	# shellcheck disable=SC2206 # a pattern
	found=(tests/mutants/shuttle/$name.patch tests/mutants/sim/*/$name.patch tests/mutants/soak/$name.patch)
	for patch in "${found[@]}"; do [ ! -f "$patch" ] || patches+=("$patch"); done
done
[ ${#patches[@]} -gt 0 ] || { echo "no such defect: $*"; exit 1; }
tests=(engine::wait::tests engine::due::tests engine::hold::tests)

fresh() {
	rm -rf "$copy" && mkdir -p "$copy"
	git ls-files -z | xargs -0 tar -cf - | tar -xmf - -C "$copy"
}
# of one way to find defects, named by its folder: builds it, and looks
build() {
	case $1 in
	*/shuttle/*) (cd "$copy" && cargo test --quiet --lib --all-features --no-run) ;;
	*/soak/*) (cd "$copy" && cargo build --quiet -p nestlock-soak) ;;
	*) (cd "$copy" && cargo build --quiet --release -p nestlock-sim) ;;
	esac >"$log" 2>&1
}
look() {
	case $1 in
	# five times the orders that `make test` tries: what is found once in a thousand must not be left to luck
	*/shuttle/*) (cd "$copy" && NESTLOCK_SHUTTLE=5 cargo test --quiet --lib --all-features -- "${tests[@]}") ;;
	*/soak/*)
		for seed in 1 2 3; do
			# shellcheck disable=SC2046 # words
			"$CARGO_TARGET_DIR/debug/nestlock-soak" run $(sed -n '1s/^# soak: //p' "$1") "seed=$seed" patience=30 || return 1
		done
		;;
	*) "$CARGO_TARGET_DIR/release/nestlock-sim" "kind=$(basename "$(dirname "$1")")" "seeds=$seeds" ;;
	esac >"$log" 2>&1
}

fresh
declare -A sound
for patch in "${patches[@]}"; do
	[ -z "${sound[$(dirname "$patch")]:-}" ] || continue
	sound[$(dirname "$patch")]=yes
	build "$patch" && look "$patch" || { cat "$log"; echo "$(dirname "$patch"): they fail without any defect"; exit 1; }
done
for patch in "${patches[@]}"; do
	fresh
	patch --quiet --strip=1 --directory="$copy" <"$patch"
	build "$patch" || { cat "$log"; echo "$patch: does not compile"; exit 1; }
	from=$SECONDS
	if look "$patch"; then
		echo "SURVIVED  $patch" && survivors=1
		continue
	fi
	echo "fell      $patch: in $((SECONDS - from)) s"
	sed -n -e 's/^---- \(.*\) stdout ----$/          \1/p' -e 's/^failed in run/            &/p' "$log"
	[[ $patch != */soak/* ]] || echo "          $(grep -m1 ' violations$' "$log")"
	[[ $patch != */sim/* ]] || echo "          $(grep -c FAILED "$log") of $seeds seeds; $(grep -m1 WRONG "$log" || grep -m1 panicked "$log")"
done
exit $survivors
