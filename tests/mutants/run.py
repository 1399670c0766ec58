#!/usr/bin/env python3
"""Switches on one known defect of nestlock after the other, and sees who notices: README.md.

run.py [NAME..]   these defects, or all: by the WAYS "models sim soak it", the simulator with SEEDS=60; writes the table
                  TESTS='lua:: red::' for these of tests/it only
run.py again [NAME..]
                  each defect by what it fell by in the table, until one way finds it: minutes; writes nothing
run.py few        those that must fall within 5 seeds, in each push; writes nothing
run.py tree       makes the copy with the defects in it, to edit them there
run.py record     writes defects.patch from what was edited there
"""

import contextlib
import fcntl
import filecmp
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).absolute()
OUT = TARGET / "mutants"
COPY = OUT / "tree"
PATCH = HERE / "defects.patch"
TABLE = HERE / "defects.txt"
README = HERE / "README.md"
WAYS = ["models", "sim", "soak", "it"]
# the quickest first
WAYS_AGAIN = ["it", "models", "sim", "soak"]
COLUMNS = ["defect", "what is wrong", "it", "simulation", "soak", "models"]
SURVIVED = "-"
NOT_RUN = "?"
FEW_SEEDS = 5
# of tests/it those with one of these in their names; that none of some notices says nothing, and is not written down
TESTS = os.environ.get("TESTS", "").split()
# a test that says nothing for so long hangs, and that is a fall
PATIENCE = 300


class Defect:
    def __init__(self, line):
        self.name, self.kinds, self.soak, self.wrong, *reason = (part.strip() for part in line.split("|"))
        self.few = self.kinds.endswith("!")
        self.kinds = self.kinds.rstrip("!").split()
        # why nobody can notice it
        self.reason = reason[0] if reason else ""


def defects():
    lines = TABLE.read_text().splitlines()
    return [Defect(line) for line in lines if line and not line.startswith("#")]


def give_up(why):
    sys.exit(f"run.py: {why}")


@contextlib.contextmanager
def alone():
    """Nobody else makes the copy, or writes the table: several ways may be gone at once."""
    with (OUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- the copy ---


def make_copy():
    """The tree as it is here, with the defects in it. What has not changed keeps its time, for cargo."""
    fresh = OUT / "fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, fresh / name)
    # another version is another package: cargo shares what is built of the dependencies, and nothing of the tree
    manifest = fresh / "Cargo.toml"
    text, versions = re.subn(r'(?m)^(version = "[^"]*)"$', r'\1+defects"', manifest.read_text(), count=1)
    if versions != 1:
        give_up("no version in Cargo.toml")
    manifest.write_text(text)
    # what else defects.txt says is no reason to build anew
    (fresh / "crates/nestlock-wire/src/defects.txt").write_text("".join(f"{defect.name}\n" for defect in defects()))
    applied = ""
    if PATCH.exists():
        patch = ["patch", "--fuzz=0", "--strip=1", "--batch", "--no-backup-if-mismatch", f"--input={PATCH}"]
        done = subprocess.run(patch, cwd=fresh, capture_output=True, text=True)
        applied = "" if done.returncode == 0 else done.stdout + done.stderr
    mirror(fresh, COPY)
    return applied


def mirror(source, copy):
    known = {path.relative_to(copy) for path in copy.rglob("*") if path.is_file()}
    wanted = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    for name in known - wanted:
        (copy / name).unlink()
    for name in wanted:
        if name not in known or not filecmp.cmp(source / name, copy / name, shallow=False):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, copy / name)


def record():
    if not COPY.is_dir():
        give_up("there is no copy to record: `run.py tree` first")
    tops = [(base, base / top) for base in (ROOT, COPY) for top in ("src", "crates/nestlock-wire/src", "tests")]
    names = {path.relative_to(base) for base, top in tops for path in top.rglob("*.rs")}
    # no defect takes a file away: what the copy does not have is newer than the copy
    names = {name for name in names if (COPY / name).exists()}
    text = ""
    # with little around it, that changes of the neighbours do no harm
    for name in sorted(names):
        sides = [str(base / name) if (base / name).exists() else "/dev/null" for base in (ROOT, COPY)]
        labels = [f"--label={side}/{name}" for side in "ab"]
        text += subprocess.run(["diff", "-U2", *labels, *sides], capture_output=True, text=True).stdout
    # what did not apply to the copy would be gone for good
    missing = [defect.name for defect in defects() if f'"{defect.name}"' not in text]
    if missing:
        give_up(f"not in the copy: {', '.join(missing)}")
    PATCH.write_text(text)


def build(way):
    """The programs that look for defects this way."""
    test = ["test", "-p", "nestlock", "--all-features", "--no-run"]
    what = {
        "models": [*test, "-p", "nestlock-wire", "--lib"],
        "it": [*test, "--test", "it"],
        "sim": ["build", "--release", "-p", "nestlock-sim"],
        "soak": ["build", "-p", "nestlock-soak"],
    }[way]
    began = time.monotonic()
    cargo = ["cargo", *what, "--quiet", "--message-format=json-render-diagnostics"]
    env = {**os.environ, "CARGO_TARGET_DIR": str(TARGET)}
    done = subprocess.run(cargo, cwd=COPY, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        give_up(f"{way}: the copy does not compile")
    built = [json.loads(line) for line in done.stdout.splitlines()]
    programs = {one["target"]["name"]: Path(one["executable"]) for one in built if one.get("executable")}
    print(f"{way}: built in {time.monotonic() - began:.0f} s", flush=True)
    if what[0] == "test":
        return programs
    # out of the way: the tree's program has the same name
    (OUT / "bin").mkdir(exist_ok=True)
    return {name: program.replace(OUT / "bin" / program.name) for name, program in programs.items()}


# --- looking ---


class Run:
    """A program in a process group of its own, line by line."""

    def __init__(self, command, defect, log, **env):
        env = {**os.environ, **env, "NESTLOCK_DEFECT": defect}
        log.parent.mkdir(exist_ok=True)
        self.log = log.open("a")
        self.process = subprocess.Popen(
            command, cwd=COPY, env=env, text=True, errors="replace", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        self.hung = False
        self.alarm = None

    def lines(self):
        self.feed()
        for line in self.process.stdout:
            self.feed()
            self.log.write(line)
            yield line.rstrip("\n")
        self.process.wait()

    def feed(self):
        if self.alarm:
            self.alarm.cancel()
        self.alarm = threading.Timer(PATIENCE, self.hangs)
        self.alarm.daemon = True
        self.alarm.start()

    def hangs(self):
        self.hung = True
        self.end()

    def end(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.alarm and self.alarm.cancel()
        self.end()
        self.process.wait()
        self.log.close()


def first_failing_test(program, args, defect, log, **env):
    """The first test that fails, and fails again alone."""
    slow = set()
    with Run([program, *args], defect, log, **env) as run:
        for line in run.lines():
            if found := re.match(r"test (\S+) (?:- should panic )?\.\.\. FAILED", line):
                if fails_alone(program, found[1], defect, log, **env):
                    return found[1]
                print(f"  {found[1]} failed, and not alone", flush=True)
                run.feed()
            elif found := re.match(r"test (\S+) has been running for over", line):
                slow.add(found[1])
            elif found := re.match(r"test (\S+) \.\.\. ok", line):
                slow.discard(found[1])
        if run.hung:
            return f"{' '.join(sorted(slow)) or 'a test'} hangs"
        # 101: tests have failed, as was seen
        return None if run.process.returncode in (0, 101) else "the program died"


def fails_alone(program, test, defect, log, **env):
    with Run([program, test, "--exact"], defect, log, **env) as run:
        for _ in run.lines():
            pass
        return run.hung or run.process.returncode != 0


def passes_alone(program, test, log):
    with Run([program, test, "--exact"], "", log, NESTLOCK_TEST_SERVER="real") as run:
        ran = any(line.startswith("test result: ok. 1 passed") for line in run.lines())
        return ran and not run.hung


def look_with_models(programs, defect, log, _):
    # five times the orders that `make test` tries: what is found once in a thousand must not be left to luck
    if fell := first_failing_test(programs["nestlock"], ["engine::", "store::"], defect.name, log, NESTLOCK_SHUTTLE="5"):
        return fell
    fell = first_failing_test(programs["nestlock_wire"], [], defect.name, log)
    return fell and f"wire::{fell}"


def look_with_it(programs, defect, log, _):
    # the house's rules are about the sources
    args = ["--skip", "house::", *TESTS]
    threads = os.environ.get("RUST_TEST_THREADS", "10")
    return first_failing_test(programs["it"], args, defect.name, log, NESTLOCK_TEST_SERVER="real", RUST_TEST_THREADS=threads)


def look_with_sim(programs, defect, log, seeds):
    found = []
    for kind in defect.kinds:
        failed = []
        with Run([programs["nestlock-sim"], f"kind={kind}", f"seeds={seeds}"], defect.name, log) as run:
            for line in run.lines():
                if hit := re.search(r"FAILED: .* seed=(\d+)", line):
                    failed.append(int(hit[1]))
            if run.process.returncode != 0 and not failed:
                give_up(f"the simulator says no to kind={kind}; see {log}")
        if failed:
            found.append(f"{len(failed)} of {seeds}, {kind}, first {min(failed)}")
    return "; ".join(found) or None


def soak(program, defect, log, seed):
    """The sorts of what this run found wrong."""
    words, folder = set(), None
    with Run([program, "run", *defect.soak.split(), f"seed={seed}", "patience=30"], defect.name, log) as run:
        for line in run.lines():
            if hit := re.match(r"VIOLATION (\S+)", line):
                words.add(hit[1])
            elif hit := re.match(r"the histories are in (.*)", line):
                folder = hit[1]
        if run.process.returncode != 0 and not words:
            words.add("no verdict")
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    return words


def look_with_soak(programs, defect, log, _):
    program = programs["nestlock-soak"]
    for seed in (1, 2):
        # and again: a machine that is too slow is no defect
        if (words := soak(program, defect, log, seed)) and (again := words & soak(program, defect, log, seed)):
            return f"run {seed}: {', '.join(sorted(again))}"
        if words:
            print(f"  run {seed} found {', '.join(sorted(words))}, and not again", flush=True)
    return None


def lines_of(command, defect, log):
    with Run(command, defect.name, log) as run:
        yield from run.lines()


def tests_of(way, programs, cell):
    """The program and the test that a cell of the table names: `name`, or `name hangs`."""
    cell = cell.removesuffix(" hangs")
    if way == "models":
        cell, wire = re.subn("^wire::", "", cell)
        return programs["nestlock_wire" if wire else "nestlock"], cell
    return programs["it"], cell


def still_falls(way, programs, defect, cell, log):
    """Whether a defect falls by what this cell of the table names."""
    if way == "sim":
        kinds = set(re.findall(r"of \d+, (\w+), first", cell))
        return any(
            "FAILED: " in line
            for kind in kinds
            for line in lines_of([programs["nestlock-sim"], f"kind={kind}", "seeds=60"], defect, log)
        )
    if way == "soak":
        return bool(look_with_soak(programs, defect, log, None))
    program, test = tests_of(way, programs, cell)
    # a test that is gone, or falls by itself, says nothing
    env = {"NESTLOCK_TEST_SERVER": "real", "NESTLOCK_SHUTTLE": "5"}
    return passes_alone(program, test, log) and all(fails_alone(program, test, defect.name, log, **env) for _ in range(2))


def again(chosen, ways):
    """Each defect by one of the ways by which it fell last time, the quickest first."""
    table, left = read_table(), {defect.name: defect for defect in chosen if not defect.reason}
    for way in ways:
        fell = {name: table.get(name, {}).get(way, "") for name in left}
        fell = {name: cell for name, cell in fell.items() if has_fallen({way: cell})}
        programs = build(way) if fell else {}
        for name, cell in fell.items():
            began, log = time.monotonic(), OUT / "log" / f"{name}.{way}"
            log.unlink(missing_ok=True)
            falls = still_falls(way, programs, left[name], cell, log)
            took = time.monotonic() - began
            print(f"{way}: {name}: {'falls' if falls else 'NO LONGER'} by {cell} ({took:.0f} s)", flush=True)
            if falls:
                del left[name]
    if left:
        give_up(f"{len(chosen) - len(left)} found; not as the table says: {' '.join(left)}")
    print(f"{len(chosen)} found")


LOOK = {"models": look_with_models, "sim": look_with_sim, "soak": look_with_soak, "it": look_with_it}


def is_meant(way, defect):
    # no unit test runs a script
    edits_script = f'+    "{defect.name}" in "' in PATCH.read_text()
    return bool({"sim": defect.kinds, "soak": defect.soak, "models": not edits_script}.get(way, True))


def prove_sound(way, programs, chosen, seeds):
    """Without any defect nobody may fall. What this program has proven is not proven again."""
    proven = OUT / "proven"
    known = proven.read_text().splitlines() if proven.exists() else []
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in programs.values())).hexdigest()
    none = Defect("|".join(["", "", "", ""]))
    asked = {"sim": lambda d: d.kinds, "soak": lambda d: [d.soak]}.get(way, lambda _: [""])
    for setting in sorted({setting for defect in chosen for setting in asked(defect)}):
        more = {"sim": seeds, "it": " ".join(TESTS)}.get(way, "")
        line = f"{digest} {way} {setting} {more}"
        if line in known:
            continue
        none.kinds, none.soak = [setting], setting
        log = OUT / "log" / f"none.{way}"
        if fell := LOOK[way](programs, none, log, seeds):
            give_up(f"{way} {setting}: falls without any defect: {fell}; see {log}")
        with proven.open("a") as file:
            file.write(line + "\n")


# --- the table ---


def read_table():
    """Of each defect, what the table says of each way."""
    cells = {}
    for line in README.read_text().splitlines():
        if found := re.match(r"\| `(\w+)` \|", line):
            of_one = [cell.strip() for cell in line.strip("|").split("|")]
            cells[found[1]] = dict(zip(("it", "sim", "soak", "models"), of_one[2:]))
    return cells


def write_table(defect, way, cell):
    cells = read_table()
    cells.setdefault(defect.name, {})[way] = cell
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for defect in defects():
        of_one = cells.get(defect.name, {})
        found = [of_one.get(way, NOT_RUN) if is_meant(way, defect) else "" for way in ("it", "sim", "soak", "models")]
        wrong = defect.wrong + (f" *Nobody can notice: {defect.reason}.*" if defect.reason else "")
        lines.append(f"| `{defect.name}` | {wrong} | {' | '.join(found)} |")
    text = README.read_text()
    before, _ = text.split(f"| {COLUMNS[0]} |")
    README.write_text(before + "\n".join(lines) + "\n")


def has_fallen(cells):
    return any(cell not in ("", NOT_RUN, SURVIVED) for cell in cells.values())


def main():
    words = sys.argv[1:]
    OUT.mkdir(parents=True, exist_ok=True)
    if words == ["record"]:
        return record()
    with alone():
        misfit = make_copy()
    if words == ["tree"]:
        print(f"{misfit}{COPY}/src has the defects; edit them there, then `run.py record`")
        return
    if misfit:
        give_up(f"{misfit}defects.patch does not fit the tree any more: see README.md")
    if words[:1] == ["again"]:
        chosen = [defect for defect in defects() if not words[1:] or defect.name in words]
        return again(chosen, os.environ.get("WAYS", "").split() or WAYS_AGAIN)
    few = words == ["few"]
    chosen = [defect for defect in defects() if (defect.few if few else not words or defect.name in words)]
    if unknown := set([] if few else words) - {defect.name for defect in chosen}:
        give_up(f"no such defect: {' '.join(sorted(unknown))}")
    ways = ["sim"] if few else os.environ.get("WAYS", "").split() or WAYS
    seeds = FEW_SEEDS if few else int(os.environ.get("SEEDS", "60"))
    cells = {}
    for way in ways:
        meant = [defect for defect in chosen if is_meant(way, defect)]
        if not meant:
            continue
        programs = build(way)
        prove_sound(way, programs, meant, seeds)
        for defect in meant:
            began, log = time.monotonic(), OUT / "log" / f"{defect.name}.{way}"
            log.unlink(missing_ok=True)
            fell = LOOK[way](programs, defect, log, seeds)
            took = time.monotonic() - began
            print(f"{way}: {defect.name}: {fell or 'SURVIVED'} ({took:.0f} s)", flush=True)
            if few:
                cells[defect.name] = {way: fell or SURVIVED}
            elif fell or not (way == "it" and TESTS):
                with alone():
                    write_table(defect, way, fell or SURVIVED)
    cells = cells or read_table()
    survivors = [d.name for d in chosen if not d.reason and not has_fallen(cells.get(d.name, {}))]
    if survivors:
        give_up(f"nobody noticed: {' '.join(survivors)}")


main()
