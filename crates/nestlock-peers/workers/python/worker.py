"""The python-redis-lock worker of the peers: speaks the protocol of ../README.md on stdin and stdout."""

import platform
import sys
import threading
import time
from importlib.metadata import version

import redis
import redis_lock

held = {}
client = None


def named(name):
    return redis_lock.Lock(client, name, expire=30)


def connect(url):
    global client
    client = redis.StrictRedis.from_url(url)
    client.ping()
    return f"connected {version('python-redis-lock')}, Python {platform.python_version()}"


def together(count, run):
    """Runs this many threads. An error in any of them is raised."""
    failures = []

    def guarded(number):
        try:
            run(number)
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()

    def join():
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    return join


def pairs(tasks, ms):
    samples = [[] for _ in range(int(tasks))]
    start = time.perf_counter()
    end = start + int(ms) / 1000

    def run(task):
        lock = named(f"pairs:{task}")
        while True:
            before = time.perf_counter()
            if before >= end:
                return
            lock.acquire()
            lock.release()
            samples[task].append((time.perf_counter() - before) * 1e6)

    if len(samples) == 1:
        run(0)
    else:
        together(len(samples), run)()
    elapsed = (time.perf_counter() - start) * 1e6
    micros = sorted(sum(samples, []))
    shares = [micros[int(len(micros) * share)] for share in (0.5, 0.9, 0.99, 0.999)]
    return " ".join(str(part) for part in ["pairs", len(micros), elapsed, *shares])


def lock(name):
    taken = named(name)
    taken.acquire()
    at = time.monotonic_ns()
    held[name] = taken
    return f"locked {at}"


def unlock(name):
    at = time.monotonic_ns()
    held.pop(name).release()
    return f"unlocked {at}"


def drain(name, waiters):
    first = named(name)
    first.acquire()

    def run(_):
        mine = named(name)
        mine.acquire()
        mine.release()

    join = together(int(waiters), run)
    time.sleep(0.4)  # until all of them wait
    start = time.perf_counter()
    first.release()
    join()
    return f"drained {(time.perf_counter() - start) * 1e6}"


def hold(count):
    for number in range(int(count)):
        lock(f"hold:{number}")
    return "held"


def free():
    for name in list(held):
        unlock(name)
    return "freed"


requests = {"connect": connect, "pairs": pairs, "lock": lock, "unlock": unlock, "drain": drain, "hold": hold, "free": free}

for line in sys.stdin:
    word, *rest = line.split()
    try:
        answer = requests[word](*rest)
    except Exception as failure:
        answer = f"error {failure!r}".replace("\n", " ")
    print("@", answer, flush=True)
