"""The python-redis-lock worker of the interop tests: speaks the protocol of ../README.md on stdin and stdout."""

import logging
import random
import sys
import time

import redis
import redis_lock

# "Failed to acquire" is a reply here, not a warning
logging.getLogger("redis_lock").setLevel(logging.ERROR)

now = time.monotonic_ns


def say(*parts):
    sys.stdout.write("@ " + " ".join(str(part) for part in parts).replace("\n", " ") + "\n")
    sys.stdout.flush()


def seconds(milliseconds):
    """The library counts in whole seconds."""
    whole, rest = divmod(int(milliseconds), 1000)
    if rest:
        raise ValueError(f"{milliseconds} ms are not whole seconds")
    return whole


class Worker:
    def connect(self, *urls):
        if len(urls) != 1:
            raise ValueError("python-redis-lock locks on one server")
        self.client = redis.StrictRedis.from_url(urls[0])
        self.client.ping()
        self.held = {}
        say("connected", now())

    def take(self, name, ttl, wait, owner=None):
        """The lock, or None if it is busy. TTL 0 means no TTL."""
        lock = redis_lock.Lock(self.client, name, expire=seconds(ttl) or None, id=owner)
        if wait == "own":
            held = lock.acquire()
        elif wait == "0":
            held = lock.acquire(blocking=False)
        else:
            held = lock.acquire(timeout=seconds(wait))
        return lock if held else None

    def acquire(self, name, ttl, wait, owner=None):
        lock = self.take(name, ttl, wait, owner)
        at = now()
        if lock is None:
            say("busy", at)
        else:
            self.held[name] = lock
            say("acquired", at)

    def adopt(self, name, owner):
        self.held[name] = redis_lock.Lock(self.client, name, id=owner)
        say("adopted", now())

    def release(self, name):
        lock = self.held.pop(name)
        at = now()
        try:
            lock.release()
            say("released", at)
        except redis_lock.NotAcquired:
            say("lost", at)

    def extend(self, name, ttl):
        at = now()
        try:
            self.held[name].extend(expire=seconds(ttl))
            say("extended", at)
        except redis_lock.NotAcquired:
            say("lost", at)

    def reset(self, name):
        at = now()
        redis_lock.Lock(self.client, name).reset()
        say("reset", at)

    def run(self, name, counter, holds, ttl, seed):
        chance = random.Random(int(seed))
        for _ in range(int(holds)):
            lock = self.take(name, ttl, ttl)
            if lock is None:
                raise TimeoutError(f"busy for {ttl} ms")
            start = now()
            count = int(self.client.get(counter) or 0)
            time.sleep(chance.uniform(0, 0.0005))
            self.client.set(counter, count + 1)
            end = now()
            lock.release()
            say("hold", start, end)
            time.sleep(chance.uniform(0, 0.002))
        say("done", holds)


REQUESTS = ("connect", "acquire", "adopt", "release", "extend", "reset", "run")

worker = Worker()
for line in sys.stdin:
    request, *words = line.split()
    try:
        if request not in REQUESTS:
            raise ValueError(f"unknown request {request}")
        getattr(worker, request)(*words)
    except Exception as error:  # report every error as a reply
        say("error", type(error).__name__, error)
