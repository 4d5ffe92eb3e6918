-- Queues the owner if the key is held, and grants it otherwise.
-- :number of the request, :key, :owner, :kept microseconds of the lease, :further number of further fences, :channel
-- One row: the number, fence or NULL if queued, whether other owners are queued, microseconds until the holder's
-- lease ends, rank in the queue. No row where the lease has no row: such a row cannot be locked, so nothing is changed.
SET @holder = NULL;
SELECT owner INTO @holder FROM lock_lease WHERE `key` = :key FOR UPDATE;
UPDATE lock_lease SET
    last_fence = IF(owner = :owner AND until > @now,
        GREATEST(last_fence, fence + :further), GREATEST(last_fence + 1, @now) + :further),
    fence = IF(owner = :owner AND until > @now, fence, last_fence - :further),
    until = IF(owner = :owner, GREATEST(until, @now + :kept), @now + :kept),
    channel = :channel,
    owner = :owner,
    contended = EXISTS (SELECT 1 FROM lock_queue AS other WHERE other.`key` = :key AND other.owner <> :owner)
WHERE `key` = :key AND @holder IS NOT NULL AND (owner IN ('', :owner) OR until <= @now);
DELETE FROM lock_queue WHERE `key` = :key AND owner = :owner AND @holder IS NOT NULL
    AND EXISTS (SELECT 1 FROM lock_lease AS lease WHERE lease.`key` = :key AND lease.owner = :owner);
-- An owner that is queued keeps its position. A new one is behind all others.
UPDATE lock_queue SET channel = :channel, seen = @now WHERE `key` = :key AND owner = :owner AND @holder IS NOT NULL;
INSERT INTO lock_queue (`key`, owner, position, channel, seen)
SELECT lease.`key`, :owner, COALESCE(MAX(queued.position), 0) + 1, :channel, @now
FROM lock_lease AS lease LEFT JOIN lock_queue AS queued ON queued.`key` = lease.`key`
WHERE lease.`key` = :key AND lease.owner <> :owner AND @holder IS NOT NULL
GROUP BY lease.`key`
HAVING COALESCE(SUM(queued.owner = :owner), 0) = 0;
UPDATE lock_lease SET contended = true WHERE `key` = :key AND @holder IS NOT NULL AND owner <> :owner AND NOT contended;
SELECT :number, IF(lease.owner = :owner, lease.fence, NULL), lease.contended, lease.until - @now, (
        SELECT COUNT(*) FROM lock_queue AS earlier JOIN lock_queue AS queued ON queued.`key` = earlier.`key`
        WHERE queued.`key` = :key AND queued.owner = :owner AND earlier.position < queued.position
            AND earlier.seen > @now - 10000000
    )
FROM lock_lease AS lease WHERE lease.`key` = :key AND @holder IS NOT NULL
