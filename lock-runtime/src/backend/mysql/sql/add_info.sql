-- Adds the column to leases of an older version. Waits only briefly: all statements on the leases wait behind this one.
SET SESSION lock_wait_timeout = 1;
ALTER TABLE lock_lease ADD COLUMN info varbinary(255)
