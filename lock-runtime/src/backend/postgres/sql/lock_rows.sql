-- First statement of a transaction that reads and changes wait queues. What follows sees every change that was
-- made under these locks.
-- $1 keys
SELECT key FROM lock_lease WHERE key = ANY ($1::bytea[]) ORDER BY key FOR UPDATE
