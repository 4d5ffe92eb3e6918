-- Reads the holder of a key and its wait queue. Nothing is locked.
-- :key, :most number of waiters, :server the start of channels of this server
-- One row for the holder, if there is one: 0, owner, microseconds until its lease expires, fence, NULL, text about
-- the owner. Then one for each of the first waiters: its position, owner, NULL, NULL, number of all waiters, NULL
SELECT 0, lease.owner, lease.until - @now, lease.fence, NULL /*info , lease.info info*/
FROM lock_lease AS lease
WHERE lease.`key` = :key AND lease.owner <> '' AND lease.until > @now
UNION ALL (
    SELECT queued.position, queued.owner, NULL, NULL, COUNT(*) OVER () /*info , NULL info*/
    FROM lock_queue AS queued
    WHERE queued.`key` = :key AND queued.seen > @now - 10000000
        AND (LEFT(queued.channel, CHAR_LENGTH(:server)) <> :server OR IS_USED_LOCK(queued.channel) IS NOT NULL)
    ORDER BY queued.position
    LIMIT :most
)
ORDER BY 1
