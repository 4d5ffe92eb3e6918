-- Queues the owner if the key is held, and grants it otherwise.
-- :number of the request, :key, :owner, :kept microseconds of the lease, :further number of further fences, :channel,
-- :info a text about the owner
-- With pins also :queues, whether the owner may be queued.
-- One row: the number, fence or NULL if queued, whether other owners are queued, microseconds until the holder's
-- lease ends or NULL if the key is pinned, rank in the queue. No row where the lease has no row: such a row cannot be locked, so nothing is changed.
SET @holder = NULL;
SELECT owner INTO @holder FROM lock_lease WHERE `key` = :key FOR UPDATE;
/*pin
SET @is_open = 0, @unpinned = NULL, @is_pinned = 0;
SELECT owner IN ('', :owner) OR until <= @now INTO @is_open FROM lock_lease WHERE `key` = :key AND @holder IS NOT NULL;
-- A fence row that is locked is pinned by an open transaction of a former holder.
SELECT fence INTO @unpinned FROM lock_fence WHERE `key` = :key AND @is_open FOR UPDATE SKIP LOCKED;
SELECT @unpinned IS NULL INTO @is_pinned FROM lock_fence WHERE `key` = :key AND @is_open;
pin*/
UPDATE lock_lease SET
    last_fence = IF(owner = :owner AND until > @now,
        GREATEST(last_fence, fence + :further), GREATEST(last_fence + 1, @now) + :further),
    fence = IF(owner = :owner AND until > @now, fence, last_fence - :further),
    until = IF(owner = :owner, GREATEST(until, @now + :kept), @now + :kept),
    channel = :channel,
    /*info info = :info, info*/
    owner = :owner,
    contended = EXISTS (SELECT 1 FROM lock_queue AS other WHERE other.`key` = :key AND other.owner <> :owner)
WHERE `key` = :key AND @holder IS NOT NULL AND (owner IN ('', :owner) OR until <= @now) /*pin AND NOT @is_pinned pin*/;
/*pin
-- Fails the pins of former holders from here on.
INSERT INTO lock_fence (`key`, fence)
SELECT lease.`key`, lease.fence FROM lock_lease AS lease
WHERE lease.`key` = :key AND @holder IS NOT NULL AND lease.owner = :owner AND NOT @is_pinned
ON DUPLICATE KEY UPDATE fence = VALUES(fence);
pin*/
DELETE FROM lock_queue WHERE `key` = :key AND owner = :owner AND @holder IS NOT NULL
    AND EXISTS (SELECT 1 FROM lock_lease AS lease WHERE lease.`key` = :key AND lease.owner = :owner);
-- An owner that is queued keeps its position. A new one is behind all others.
UPDATE lock_queue SET channel = :channel, seen = @now WHERE `key` = :key AND owner = :owner AND @holder IS NOT NULL;
INSERT INTO lock_queue (`key`, owner, position, channel, seen)
SELECT lease.`key`, :owner, COALESCE(MAX(queued.position), 0) + 1, :channel, @now
FROM lock_lease AS lease LEFT JOIN lock_queue AS queued ON queued.`key` = lease.`key`
WHERE lease.`key` = :key AND lease.owner <> :owner AND @holder IS NOT NULL /*pin AND :queues pin*/
GROUP BY lease.`key`
HAVING COALESCE(SUM(queued.owner = :owner), 0) = 0;
UPDATE lock_lease SET contended = true WHERE `key` = :key AND @holder IS NOT NULL AND owner <> :owner AND NOT contended
    /*pin AND :queues pin*/;
/*pin
-- A pin may outlast the reservation. The owner asks again while it waits.
UPDATE lock_lease SET until = GREATEST(until, @now + 1000000)
WHERE `key` = :key AND @holder IS NOT NULL AND owner = :owner AND @is_pinned;
pin*/
SELECT :number, IF(lease.owner = :owner /*pin AND NOT @is_pinned pin*/, lease.fence, NULL), lease.contended,
    /*pin IF(@is_pinned, NULL, pin*/ lease.until - @now /*pin ) pin*/, (
        SELECT COUNT(*) FROM lock_queue AS earlier JOIN lock_queue AS queued ON queued.`key` = earlier.`key`
        WHERE queued.`key` = :key AND queued.owner = :owner AND earlier.position < queued.position
            AND earlier.seen > @now - 10000000
    )
FROM lock_lease AS lease WHERE lease.`key` = :key AND @holder IS NOT NULL
