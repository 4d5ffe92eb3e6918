-- Lists held keys in their order. Nothing is locked.
-- :from the first key, :most how many
SELECT lease.`key` FROM lock_lease AS lease
WHERE lease.`key` >= :from AND lease.owner <> '' AND lease.until > @now
ORDER BY lease.`key`
LIMIT :most
