#!/usr/bin/env python3
"""Runs a test program several times on a machine that is kept busy, and lists what fell.

usage: busy.py RUNS PROGRAM [ARGUMENT ..]

Beside it run two processes that do nothing but work, and the program itself is stopped every now and then, for up to 0.3 s.
What falls then counts on time where it should wait for a state. The output of each run is kept in target/busy-N.log.
"""

import collections
import os
import random
import re
import signal
import subprocess
import sys
import threading

FELL = re.compile(r"^test (\S.*?)(?: - should panic)? \.\.\. FAILED$", re.MULTILINE)
BURN = [sys.executable, "-c", "while True: pass"]
LONGEST_STOP, LONGEST_PAUSE = 0.3, 3.0


def stops(child, is_over):
    while not is_over.wait(random.uniform(0.1, LONGEST_PAUSE)):
        child.send_signal(signal.SIGSTOP)
        is_over.wait(random.uniform(0, LONGEST_STOP))
        child.send_signal(signal.SIGCONT)


def run(command, log):
    """What fell, and how the program ended."""
    with open(log, "wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        is_over = threading.Event()
        stopper = threading.Thread(target=stops, args=(child, is_over))
        stopper.start()
        # not reaped before the last signal: it would reach another process
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        is_over.set()
        stopper.join()
        code = child.wait()
    with open(log, encoding="utf-8", errors="replace") as output:
        return FELL.findall(output.read()), code


def main():
    runs, command = int(sys.argv[1]), sys.argv[2:]
    burners = [subprocess.Popen(BURN) for _ in range(2)]
    fell = collections.Counter()
    is_well = True
    try:
        for number in range(1, runs + 1):
            names, code = run(command, f"target/busy-{number}.log")
            fell.update(names)
            is_well = is_well and code == 0
            print(f"run {number} of {runs}: ended with {code}, {len(names)} fell: {' '.join(names)}", flush=True)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    for name, times in fell.most_common():
        print(f"fell {times} of {runs} times: {name}")
    return 0 if is_well else 1


sys.exit(main())
