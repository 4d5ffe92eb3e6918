-- :keys
-- One row for each key that has one: the key, its owner, microseconds until the lease ends, fence, whether owners are queued
SELECT `key`, owner, until - @now, fence, contended FROM lock_lease WHERE `key` IN (:keys)
