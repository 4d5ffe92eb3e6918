-- Adds the column to leases of an older version. Waits only briefly: all statements on the leases wait behind this one.
BEGIN;
SET LOCAL lock_timeout = 250;
ALTER TABLE lock_lease ADD COLUMN IF NOT EXISTS info bytea;
COMMIT
