-- Fails if the leases have no column for a text about their owner, or this user may not read it.
SELECT info FROM lock_lease LIMIT 0
