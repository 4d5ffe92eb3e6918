-- Makes rows of free locks for keys that have none.
-- $1 keys
INSERT INTO lock_lease (key, owner, until, fence, last_fence)
SELECT key, '', statement_timestamp(), 0, 0 FROM unnest($1::bytea[]) AS asked (key) ORDER BY key
ON CONFLICT (key) DO NOTHING
