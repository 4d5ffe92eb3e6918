-- Deletes rows of locks that have been free for a long time.
-- :keys, :age microseconds since the end of the lease
DELETE lease FROM lock_lease AS lease FORCE INDEX (PRIMARY)
WHERE lease.`key` IN (:keys) AND lease.until < @now - :age
