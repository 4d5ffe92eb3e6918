// Locks with node-redlock by the commands of holder.py; see there.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";
const require = createRequire(process.env.MODULES + "/");
const { Redis } = require("ioredis");
const { default: Redlock, ExecutionError, ResourceLockedError } = require("redlock");

const [port, key] = process.argv.slice(2);
const client = new Redis(Number(port));
const patient = { retryCount: 1500, retryDelay: 20, retryJitter: 5 };
const redlock = new Redlock([client], { automaticExtensionThreshold: 500, ...patient });
// A vote against is no error.
redlock.on("error", (error) => {
  if (!(error instanceof ResourceLockedError)) throw error;
});
let held;

async function attempt(settings) {
  try {
    return await redlock.acquire([key], 30000, settings);
  } catch (error) {
    if (error instanceof ExecutionError) return undefined;
    throw error;
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const [word, times] = line.split(" ");
  if (word === "count") {
    for (let n = 0; n < Number(times); n++) {
      const lock = await redlock.acquire([key], 30000);
      const count = Number((await client.get(key + ":count")) ?? 0);
      await new Promise((resume) => setTimeout(resume, 2));
      await client.set(key + ":count", count + 1);
      await lock.release();
    }
    console.log("counted");
  } else if (held) {
    const now = process.hrtime.bigint();
    const lock = held;
    held = undefined;
    try {
      // A lost lock stays lost: no retries.
      await redlock.release(lock, { retryCount: 0 });
      console.log(String(now));
    } catch (error) {
      if (!(error instanceof ExecutionError)) throw error;
      console.log("lost");
    }
  } else {
    held = await attempt(word === "try" ? { retryCount: 0 } : patient);
    console.log(held ? "held" : "busy");
  }
}
process.exit(0);
