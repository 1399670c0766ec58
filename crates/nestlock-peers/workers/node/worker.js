// The node-redlock worker of the peers: speaks the protocol of ../README.md on stdin and stdout.
"use strict";

const fs = require("fs");
const path = require("path");
const readline = require("readline");
const Redis = require("ioredis");
const { default: Redlock } = require("redlock");

const TTL = 30000;
const now = () => process.hrtime.bigint();
const micros = (since) => Number(now() - since) / 1000;
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const range = (count) => [...Array(Number(count)).keys()];

let locks;
const held = new Map();
const take = (name) => locks.acquire([name], TTL);

const requests = {
  async connect(url) {
    const client = new Redis(url);
    await client.ping();
    // waits as the library does by default, but without limit
    locks = new Redlock([client], { retryCount: -1 });
    locks.on("error", () => {}); // "busy" is reported as an error, too
    // the package exports no package.json
    const manifest = path.join(path.dirname(require.resolve("redlock")), "../../package.json");
    const { version } = JSON.parse(fs.readFileSync(manifest));
    return `connected ${version}, Node ${process.versions.node}`;
  },

  async pairs(tasks, ms) {
    const samples = [];
    const start = now();
    const end = start + BigInt(ms) * 1000000n;
    const run = async (task) => {
      for (let before = now(); before < end; before = now()) {
        const lock = await take(`pairs:${task}`);
        await lock.release();
        samples.push(micros(before));
      }
    };
    await Promise.all(range(tasks).map(run));
    const elapsed = micros(start);
    samples.sort((one, other) => one - other);
    const shares = [0.5, 0.9, 0.99, 0.999].map((share) => samples[Math.floor(samples.length * share)]);
    return ["pairs", samples.length, elapsed, ...shares].join(" ");
  },

  async lock(name) {
    const lock = await take(name);
    const at = now();
    held.set(name, lock);
    return `locked ${at}`;
  },

  async unlock(name) {
    const lock = held.get(name);
    held.delete(name);
    const at = now();
    await lock.release();
    return `unlocked ${at}`;
  },

  async drain(name, waiters) {
    const first = await take(name);
    const all = Promise.all(range(waiters).map(async () => (await take(name)).release()));
    await sleep(400); // until all of them wait
    const start = now();
    await first.release();
    await all;
    return `drained ${micros(start)}`;
  },

  async hold(count) {
    for (const number of range(count)) await this.lock(`hold:${number}`);
    return "held";
  },

  async free() {
    for (const name of [...held.keys()]) await this.unlock(name);
    return "freed";
  },
};

(async () => {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [word, ...rest] = line.split(" ");
    let answer;
    try {
      answer = await requests[word](...rest);
    } catch (error) {
      answer = `error ${error}`.replace(/\n/g, " ");
    }
    process.stdout.write(`@ ${answer}\n`);
  }
  process.exit(0);
})();
