-- :keys
-- The keys that have rows, which are locked until the end of the transaction
SELECT `key` FROM lock_lease FORCE INDEX (PRIMARY) WHERE `key` IN (:keys) ORDER BY `key` FOR UPDATE
