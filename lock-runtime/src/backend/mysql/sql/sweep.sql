-- Reads a bounded number of rows behind a key.
-- :last key, :age microseconds since the end of the lease, :rows
-- One row for each row that was read: the key, whether it is no longer needed
SELECT `key`, until < @now - :age FROM lock_lease WHERE `key` > :last ORDER BY `key` LIMIT :rows
