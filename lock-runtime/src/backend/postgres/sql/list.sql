-- Lists held keys in their order. Locks nothing.
-- $1 the first key, $2 how many
SELECT key FROM lock_lease
WHERE key >= $1::bytea AND owner <> '' AND until > statement_timestamp()
ORDER BY key
LIMIT $2::bigint
