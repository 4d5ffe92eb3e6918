-- Ends a lease for the head of its wait queue, and removes the owner from the queue.
-- :number of the key, :key, :owner, :reservation microseconds for the head, :successor or '', :kept microseconds of its
-- lease, :window microseconds of the barging window, :free_after microseconds until the key is free, :channel of this process,
-- :server the start of channels of this server
-- One row: the number, whether the key was the owner's, whether it is handed off
SET @holder = NULL, @ends = 0;
SELECT owner, until INTO @holder, @ends FROM lock_lease WHERE `key` = :key FOR UPDATE;
SET @now = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6));
-- A row that was missing then is not locked.
SET @held = COALESCE(@holder = :owner AND @ends > @now, 0), @head = NULL, @place = NULL, @head_channel = NULL, @next = NULL;
DELETE FROM lock_queue WHERE `key` = :key AND owner = :owner;
-- A key that is kept for a while is handed off to no owner.
-- A channel is a named lock of its process, which ends with the connection.
SELECT owner, position, channel INTO @head, @place, @head_channel FROM lock_queue
WHERE `key` = :key AND @held AND :free_after = 0 AND seen > @now - 10000000
    AND (LEFT(channel, CHAR_LENGTH(:server)) <> :server OR IS_USED_LOCK(channel) IS NOT NULL)
ORDER BY position LIMIT 1;
SELECT owner INTO @next FROM lock_queue
WHERE `key` = :key AND position > @place AND seen > @now - 10000000
    AND (LEFT(channel, CHAR_LENGTH(:server)) <> :server OR IS_USED_LOCK(channel) IS NOT NULL)
ORDER BY position LIMIT 1;
SET @granted = :free_after = 0 AND :window = 0 AND (@head IS NOT NULL OR :successor <> '');
UPDATE lock_lease SET
    last_fence = IF(@granted, GREATEST(last_fence + 1, @now), last_fence),
    fence = IF(@granted, last_fence, fence),
    until = @now + CASE WHEN :free_after > 0 THEN :free_after WHEN :window > 0 THEN :window
        WHEN @head IS NOT NULL THEN :reservation ELSE :kept END,
    channel = COALESCE(@head_channel, :channel),
    owner = CASE WHEN :free_after > 0 THEN owner WHEN :window > 0 THEN '' ELSE COALESCE(@head, :successor) END,
    contended = (:free_after > 0 AND contended) OR @next IS NOT NULL
        OR (@head IS NOT NULL AND (:window > 0 OR :successor <> ''))
WHERE `key` = :key AND @held;
DELETE queued FROM lock_queue AS queued FORCE INDEX (PRIMARY)
WHERE queued.`key` = :key AND queued.position <= @place AND @held AND :window = 0;
UPDATE lock_queue SET channel = :channel, seen = @now WHERE `key` = :key AND owner = :successor
    AND @held AND :window = 0 AND @head IS NOT NULL;
INSERT INTO lock_queue (`key`, owner, position, channel, seen)
SELECT lease.`key`, :successor, COALESCE(MAX(queued.position), 0) + 1, :channel, @now
FROM lock_lease AS lease LEFT JOIN lock_queue AS queued ON queued.`key` = lease.`key`
WHERE lease.`key` = :key AND @held AND :window = 0 AND @head IS NOT NULL AND :successor <> ''
GROUP BY lease.`key`
HAVING COALESCE(SUM(queued.owner = :successor), 0) = 0;
SELECT :number, @held, @head IS NOT NULL AND :window = 0
