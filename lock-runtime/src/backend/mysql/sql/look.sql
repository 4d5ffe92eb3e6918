-- Reads what the waiters of this process wait for. Nothing is locked.
-- :keys, :waiters key and owner in one text
-- One row for each waiter that is queued, or that was granted the key: the key, the waiter, whether the key is its own,
-- whether the key is free, microseconds until the end of the lease or of the barging window, how many are before it
SELECT queued.`key`, queued.owner, lease.owner = queued.owner, lease.owner = '' OR lease.until <= @now,
    lease.until - @now, (
        SELECT COUNT(*) FROM lock_queue AS earlier
        WHERE earlier.`key` = queued.`key` AND earlier.position < queued.position AND earlier.seen > @now - 10000000
    )
FROM lock_queue AS queued LEFT JOIN lock_lease AS lease ON lease.`key` = queued.`key`
WHERE queued.`key` IN (:keys) AND CONCAT(queued.`key`, queued.owner) IN (:waiters)
UNION ALL
SELECT lease.`key`, lease.owner, 1, 0, lease.until - @now, 0
FROM lock_lease AS lease
WHERE lease.`key` IN (:keys) AND CONCAT(lease.`key`, lease.owner) IN (:waiters) AND lease.until > @now
