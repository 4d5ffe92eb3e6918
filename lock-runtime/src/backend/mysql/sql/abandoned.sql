-- Reads entries of processes that have ended.
-- :rows
SELECT `key`, owner FROM lock_queue WHERE seen < @now - 60000000 ORDER BY `key` LIMIT :rows
