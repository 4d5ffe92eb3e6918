# Locks with redis-py by commands on standard input, and prints times of the machine's monotonic clock.
# Arguments: port, key. Lines in, lines out:
#   try      "held" or "busy"
#   count n  n times under the lock adds one to `<key>:count`, unprotected otherwise; then "counted"
#   any      waits for the lock, then "held"; if it is held, releases it: nanoseconds before that, or "lost"
import sys, time
import redis

port, key = int(sys.argv[1]), sys.argv[2]
client = redis.Redis(port=port)
held = None


def say(line):
    print(line, flush=True)


for line in sys.stdin:
    word = line.split()
    if word[:1] == ["count"]:
        for _ in range(int(word[1])):
            with client.lock(key, timeout=30, sleep=0.02):
                count = int(client.get(key + ":count") or 0)
                time.sleep(0.002)
                client.set(key + ":count", count + 1)
        say("counted")
    elif held:
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        lock, held = held, None
        try:
            lock.release()
            say(now)
        except redis.exceptions.LockNotOwnedError:
            say("lost")
    else:
        lock = client.lock(key, timeout=30, sleep=0.02)
        if lock.acquire(blocking=word[:1] != ["try"]):
            held = lock
            say("held")
        else:
            say("busy")
