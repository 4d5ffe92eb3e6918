-- Reads a page of keys in their order, with whether each is held. Nothing is locked.
-- :from the first key, :most how many
SELECT lease.`key`, lease.owner <> '' AND lease.until > @now FROM lock_lease AS lease
WHERE lease.`key` >= :from
ORDER BY lease.`key`
LIMIT :most
