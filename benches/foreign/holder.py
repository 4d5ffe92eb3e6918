# Holds a lock of redis-py until told to let go; says when it did, on the machine's monotonic clock.
# Arguments: port, key. Lines in: anything. Lines out: "held", then nanoseconds.
import sys, time
import redis

port, key = int(sys.argv[1]), sys.argv[2]
client = redis.Redis(port=port)
for _ in sys.stdin:
    lock = client.lock(key, timeout=30)
    lock.acquire()
    print("held", flush=True)
    sys.stdin.readline()
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    lock.release()
    print(now, flush=True)
