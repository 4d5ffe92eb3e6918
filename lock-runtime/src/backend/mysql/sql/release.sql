-- Frees each key that is its owner's and has no wait queue.
-- :keys, :leases key and owner in one text
-- One row for each key that is freed: the key, its owner
SELECT `key`, owner FROM lock_lease FORCE INDEX (PRIMARY)
WHERE `key` IN (:keys) AND CONCAT(`key`, owner) IN (:leases) AND until > @now AND NOT contended
ORDER BY `key` FOR UPDATE;
UPDATE lock_lease FORCE INDEX (PRIMARY) SET owner = '', until = @now
WHERE `key` IN (:keys) AND CONCAT(`key`, owner) IN (:leases) AND until > @now AND NOT contended
