-- Reads for which held keys of this process owners are queued.
-- :channel of this process
-- One row for each: the key
SELECT DISTINCT lease.`key` FROM lock_queue AS queued JOIN lock_lease AS lease ON lease.`key` = queued.`key`
WHERE lease.channel = :channel AND lease.until > @now
