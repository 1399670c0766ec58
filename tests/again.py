#!/usr/bin/env python3
"""Runs a cargo test command; what fell runs once more, one test after the other, with nothing beside it.

usage: again.py LIST cargo test .. [-- ..]

What passes then was the machine's load: its name is printed last and appended to the file LIST ("-": to none), and the
run is well. Each such name is a defect of its test all the same. With STRICT=1 the run is not well.
"""

import os
import re
import subprocess
import sys

FELL = re.compile(r"^test (\S.*?)(?: - should panic)? \.\.\. FAILED$")
# a program whose tests fell says so, and ends with 101; any other end is no test's
ENDED = re.compile(r"process didn't exit successfully: .*\((.*?)\)$")


def run(command):
    """The result of a command, the tests that fell, and whether a whole program did. All of its output passes through."""
    fell, programs = [], 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as child:
        for line in child.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            line = line.rstrip("\n")
            found, ended = FELL.match(line), ENDED.search(line)
            if found and found[1] not in fell:
                fell.append(found[1])
            if ended and ended[1] != "exit status: 101":
                programs += 1
    return child.returncode, fell, programs > 0


def main():
    listed, command = sys.argv[1], sys.argv[2:]
    at = command.index("--") if "--" in command else len(command)
    cargo, tests = command[:at], command[at + 1 :]
    code, fell, is_program = run([*cargo, "--no-fail-fast", "--", *tests])
    # it was not built, or a whole program ended
    if code == 0 or is_program or not fell:
        return code
    print(f"\nonce more, alone: {', '.join(fell)}", flush=True)
    # a filter that says what not to run would leave them out, too
    again, still, _ = run([*cargo, "--no-fail-fast", "--", "--exact", "--test-threads=1", *fell])
    if again != 0:
        print(f"\nfell twice: {', '.join(still) or 'a whole program'}", flush=True)
        return again
    names = "".join(f"passed only alone: {name}\n" for name in fell)
    print(f"\n{names}", end="", flush=True)
    if listed != "-":
        with open(listed, "a", encoding="utf-8") as file:
            file.write(names)
    return 1 if os.environ.get("STRICT") == "1" else 0


sys.exit(main())
