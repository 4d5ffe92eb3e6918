-- Reads a page of keys in their order, with whether each is held. Locks nothing.
-- $1 the first key, $2 how many
SELECT key, owner <> '' AND until > statement_timestamp() AS is_held FROM lock_lease
WHERE key >= $1::bytea
ORDER BY key
LIMIT $2::bigint
