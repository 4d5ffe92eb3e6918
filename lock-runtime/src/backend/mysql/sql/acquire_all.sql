-- Grants all keys to one owner, or none. Every key has a row; one that was swept meanwhile is a refusal too.
-- :keys, :owner, :count number of keys, :kept microseconds of the lease, :further number of further fences, :channel,
-- :info a text about the owner
-- One row: first fence or NULL if refused, whether owners are queued, microseconds until the last lease of another
-- owner ends
SET @fence = NULL, @expires = NULL;
SELECT IF(COUNT(*) = :count AND SUM(until > @now AND owner NOT IN ('', :owner)) = 0,
        -- A repeated request finds one fence on all keys. Keys that were taken one by one have different ones.
        IF(SUM(until > @now AND owner = :owner) = :count AND MIN(fence) = MAX(fence), MAX(fence),
            GREATEST(MAX(last_fence) + 1, @now)), NULL),
    MAX(IF(until > @now AND owner NOT IN ('', :owner), until - @now, NULL))
INTO @fence, @expires
FROM lock_lease FORCE INDEX (PRIMARY) WHERE `key` IN (:keys) FOR UPDATE;
/*pin
SET @unpinned = 0, @fences = 0;
-- A fence row that is locked is pinned by an open transaction of a former holder.
SELECT COUNT(*) INTO @unpinned FROM lock_fence FORCE INDEX (PRIMARY)
WHERE `key` IN (:keys) AND @fence IS NOT NULL FOR UPDATE SKIP LOCKED;
SELECT COUNT(*) INTO @fences FROM lock_fence WHERE `key` IN (:keys);
SET @fence = IF(@unpinned = @fences, @fence, NULL);
pin*/
UPDATE lock_lease FORCE INDEX (PRIMARY) SET
    until = IF(owner = :owner, GREATEST(until, @now + :kept), @now + :kept),
    fence = @fence,
    last_fence = GREATEST(last_fence, @fence + :further),
    channel = :channel,
    /*info info = :info, info*/
    owner = :owner
WHERE `key` IN (:keys) AND @fence IS NOT NULL;
/*pin
-- Fails the pins of former holders from here on.
INSERT INTO lock_fence (`key`, fence)
SELECT lease.`key`, @fence FROM lock_lease AS lease FORCE INDEX (PRIMARY)
WHERE lease.`key` IN (:keys) AND @fence IS NOT NULL ORDER BY lease.`key`
ON DUPLICATE KEY UPDATE fence = VALUES(fence);
pin*/
SELECT @fence, (SELECT MAX(contended) FROM lock_lease WHERE `key` IN (:keys)), @expires
