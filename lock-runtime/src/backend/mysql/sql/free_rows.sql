-- :keys
-- The keys with a row that no transaction has locked, then all keys with a row
SELECT `key` FROM lock_lease FORCE INDEX (PRIMARY) WHERE `key` IN (:keys) FOR UPDATE SKIP LOCKED;
SELECT `key` FROM lock_lease WHERE `key` IN (:keys)
