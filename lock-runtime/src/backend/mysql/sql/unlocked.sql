-- :keys
-- One row for each key that is held and that no transaction has locked: the key, its owner, whether owners are queued
SELECT `key`, owner, contended FROM lock_lease FORCE INDEX (PRIMARY)
WHERE `key` IN (:keys) AND until > TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))
FOR UPDATE SKIP LOCKED
