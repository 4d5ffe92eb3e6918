-- Frees each key that is its owner's and has no wait queue.
-- :keys, :leases key and owner in one text
-- One row for each key: the key, whether it is freed
-- The rows that are not freed stay locked too: otherwise the second statement waits for them behind rows of later keys.
SELECT `key`, CONCAT(`key`, owner) IN (:leases) AND until > @now AND NOT contended FROM lock_lease FORCE INDEX (PRIMARY)
WHERE `key` IN (:keys) ORDER BY `key` FOR UPDATE;
UPDATE lock_lease FORCE INDEX (PRIMARY) SET owner = '', until = @now
WHERE `key` IN (:keys) AND CONCAT(`key`, owner) IN (:leases) AND until > @now AND NOT contended
