// The node-redlock worker of the interop tests: speaks the protocol of ../README.md on stdin and stdout.
"use strict";

const readline = require("readline");
const Redis = require("ioredis");
const { default: Redlock, ExecutionError, Lock, ResourceLockedError } = require("redlock");

const now = () => process.hrtime.bigint();
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const say = (...parts) => process.stdout.write(`@ ${parts.join(" ").replace(/\n/g, " ")}\n`);

// seeded random numbers in [0, 1)
function seeded(seed) {
  let state = BigInt(seed);
  return () => {
    state = (state * 6364136223846793005n + 1442695040888963407n) & 0xffffffffffffffffn;
    return Number(state >> 33n) / 2 ** 31;
  };
}

let clients = [];
let once; // tries once
let own; // waits as the library does by default
const held = new Map();

async function connect(...urls) {
  clients = urls.map((url) => new Redis(url, { lazyConnect: true, enableOfflineQueue: false, maxRetriesPerRequest: 0 }));
  for (const client of clients) {
    client.on("error", () => {}); // the lock's reply reports it
    await client.connect();
  }
  once = new Redlock(clients, { retryCount: 0 });
  own = new Redlock(clients);
  say("connected", now());
}

// Whether at least one server said "held by another", rather than a failure of all.
async function taken(error) {
  if (!(error instanceof ExecutionError)) return false;
  if (error.attempts.length === 0) return true; // expired before anything was sent
  const { votesAgainst } = await error.attempts[error.attempts.length - 1];
  return [...votesAgainst.values()].some((reason) => reason instanceof ResourceLockedError);
}

// The lock, or null if it is busy. The library's own retries do not release what an attempt got on some of the servers,
// and are then blocked by it until the TTL is over: so the library tries once, and the worker retries.
async function take(name, ttl, wait, chance = Math.random) {
  const deadline = now() + BigInt(wait === "own" ? 0 : wait) * 1000000n;
  for (;;) {
    try {
      return await (wait === "own" ? own : once).acquire([name], Number(ttl));
    } catch (error) {
      if (now() >= deadline) {
        if (await taken(error)) return null;
        throw error;
      }
    }
    await sleep(1 + 3 * chance());
  }
}

// Returns whether an operation on a held lock worked, or found it lost.
async function works(operation) {
  try {
    await operation();
    return true;
  } catch (error) {
    if (await taken(error)) return false;
    throw error;
  }
}

const requests = {
  connect,
  async acquire(name, ttl, wait, owner) {
    if (owner !== undefined) throw new Error("node-redlock makes its tokens itself");
    const lock = await take(name, ttl, wait);
    const at = now();
    if (lock !== null) held.set(name, lock);
    say(lock === null ? "busy" : "acquired", at);
  },
  async adopt(name, owner) {
    held.set(name, new Lock(once, [name], owner, [], Date.now() + 60000));
    say("adopted", now());
  },
  async release(name) {
    const lock = held.get(name);
    held.delete(name);
    const at = now();
    say((await works(() => once.release(lock))) ? "released" : "lost", at);
  },
  async extend(name, ttl) {
    const at = now();
    const extend = async () => held.set(name, await once.extend(held.get(name), Number(ttl)));
    say((await works(extend)) ? "extended" : "lost", at);
  },
  async run(name, counter, holds, ttl, seed) {
    const chance = seeded(seed);
    for (let hold = 0; hold < Number(holds); hold++) {
      const lock = await take(name, ttl, "60000", chance);
      const start = now();
      if (lock === null) throw new Error("busy for a minute");
      const count = Number((await clients[0].get(counter)) || 0);
      if (chance() < 0.3) await sleep(1);
      await clients[0].set(counter, count + 1);
      const end = now();
      await once.release(lock);
      say("hold", start, end);
      await sleep(2 * chance());
    }
    say("done", holds);
  },
};

async function serve() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [request, ...words] = line.trim().split(/ +/);
    try {
      if (!(request in requests)) throw new Error(`unknown request ${request}`);
      await requests[request](...words);
    } catch (error) {
      say("error", error.name, error.message);
    }
  }
  process.exit(0);
}

serve();
