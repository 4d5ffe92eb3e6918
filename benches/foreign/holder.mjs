// Holds a lock of node-redlock until told to let go; says when it did, on the machine's monotonic clock.
// Arguments: port, key. Lines in: anything. Lines out: "held", then nanoseconds.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";
const require = createRequire(process.env.MODULES + "/");
const { Redis } = require("ioredis");
const { default: Redlock } = require("redlock");

const [port, key] = process.argv.slice(2);
const redlock = new Redlock([new Redis(Number(port))], { automaticExtensionThreshold: 500 });
let lock;
for await (const _ of createInterface({ input: process.stdin })) {
  if (!lock) {
    lock = await redlock.acquire([key], 30000);
    console.log("held");
  } else {
    const now = process.hrtime.bigint();
    await lock.release();
    lock = undefined;
    console.log(String(now));
  }
}
