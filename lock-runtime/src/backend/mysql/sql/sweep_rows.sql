-- Deletes rows of locks that have been free for a long time.
-- :keys, :age microseconds since the end of the lease
DELETE lease FROM lock_lease AS lease FORCE INDEX (PRIMARY)
WHERE lease.`key` IN (:keys) AND lease.until < @now - :age
/*pin ;
DELETE pin FROM lock_fence AS pin FORCE INDEX (PRIMARY) LEFT JOIN lock_lease AS lease ON lease.`key` = pin.`key`
WHERE pin.`key` IN (:keys) AND lease.`key` IS NULL AND pin.fence < @now - :age pin*/
